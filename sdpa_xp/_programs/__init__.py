"""What is computed from the scores of a tile, on the arrays of any library. A program knows no executor.

scores         scale -> softcap -> bias -> mask, with `bound_options`
softmax        one tile of keys after the other, with `empty_rows` and `dropout`
output, weights, statistics, gradients   with `row_statistics`, `top_keys`, `gradient_targets`
one_tile       small calls, without the objects that cut a call
patches, reproducible   programs of other programs, with `fixed_blocks`
differentiable products that a library itself differentiates
"""
