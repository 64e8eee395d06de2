"""Words by which people search for a place that does not contain them, or that other places use more often.

The index of the site gets three more fields, which mkdocs.yml weighs: `words` are those below, `name` is the
name of an object without its module or class, and `parts` are the parts of its path: KVCache is "kv" and
"cache" too. `search/queries.json` says which place a query has to find first.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

SDPA = "scaled_dot_product_attention"
WORDS = {
    "how-to/deploy/#in-the-browser": "webgpu wasm webassembly onnxruntime-web browser",
    "how-to/deploy/#keep-the-cache-on-the-device": "iobinding io_binding ortvalue kv cache gpu device",
    "how-to/deploy/#on-a-cpu": "sessionoptions  cpu",
    "how-to/verify/#read-the-report": "read report huge",
    "project/#tested-libraries": "array-api-strict strict",
    "project/#mutation-testing": "mutation testing mutants",
    "project/#what-was-not-run": "gpu cuda cupy rocm amd untested limits limitations",
    "explanation/runtimes/#five-ways-to-write-a-call": (
        "ai.onnx operators forms groupqueryattention multiheadattention"
    ),
    "project/#how-it-is-tested": (
        "float64 reference mutation mutants float64 float64 reference reference trust tested mypy py.typed "
        "hypothesis property invariants"
    ),
    "cheat-sheet/#shapes": "shape shapes layout bhsd bshd 2d 3d inputs without batch q k v query key value",
    "explanation/how-it-works/#the-array-api-and-vendor-kernels": (
        "array array api api consortium standard version"
    ),
    "explanation/precision/#rows-without-keys": (
        "fully fully masked masked row empty zero zeros row rows fully without keys"
    ),
    "explanation/how-it-works/": "flashattention tile tiles tiling algorithm",
    "explanation/precision/": "precision accuracy rounding numerical stability exact numerical error",
    "explanation/precision/#how-agreement-is-judged": "tolerance rtol atol error bound ulp",
    "explanation/precision/#the-same-result-every-time": "deterministic reproducible bitwise deterministic",
    "explanation/runtimes/": "different results wrong before 1.28 bug",
    "how-to/add-a-backend/": (
        "add add backend register registration dlpack custom array library new duck plugin support own"
    ),
    "how-to/add-a-backend/#change-sdpa_xp-itself": "kernel write",
    "how-to/add-a-backend/#override-functions": "override dispatch protocol hook __sdpa_xp__",
    "how-to/add-a-backend/#test-it-in-your-repository": "pytest own library test my",
    "how-to/add-a-backend/#what-an-array-must-have": (
        "array api functions function minimum minimal required requirements need list operator "
        "operators isdtype __array_namespace__ array_namespace setitem bool() raises raises unsigned "
        "supported xor"
    ),
    "how-to/backends/": "backend backend gpu cupy mps device mismatch",
    "how-to/backends/#dtypes": "dtype dtypes bfloat16 float16 fp16 bf16 half complex complex64 dtype",
    "how-to/backends/#inside-a-jit": "jit compile torch.compile",
    "how-to/backends/#threads": "thread threads sdpa_xp_num_threads",
    "how-to/deploy/": "deploy deployment serving inference docker container",
    "how-to/deploy/#on-cuda": "onnxruntime-gpu cudaexecutionprovider cuda gpu nvidia cudnn available not",
    "how-to/deploy/#threads-and-latency": (
        "intra_op_num_threads latency threads concurrent throughput p95 intra_op op"
    ),
    "how-to/export/": "export onnx export call export",
    "how-to/export/#run-other-tools-on-the-file": "simplify quantize_dynamic extract_model merge_models prefix",
    "how-to/deploy/#other-providers-and-languages": (
        "tensorrt directml coreml openvino c++ cpp c# java rust language languages other provider providers "
        "trtexec rocm amd csharp"
    ),
    "how-to/export/#bfloat16": "onnx bf16",
    "how-to/deploy/#choose-the-runtime-not-the-form": (
        "groupqueryattention choose chosen opset form runtime onnxruntime version older"
    ),
    "how-to/export/#decode-with-a-cache": "past past_key past_key_values",
    "how-to/export-a-layer/#dtypes-in-a-traced-function": "quantize quantized quantization int8",
    "how-to/export-a-layer/#export-a-whole-layer": (
        "export layer custom function weights onnx load own pretrained state_dict checkpoint safetensors"
    ),
    "how-to/export/#files-over-2-gib": "2gb 2gib protobuf larger external data exceeds maximum",
    "how-to/export-a-layer/#export-a-whole-block-norm-attention-mlp": "transformerencoderlayer block norm mlp",
    "how-to/export/#float16": "export float16 half fp16 onnx",
    "how-to/export/#leave-lengths-open": "dynamic open batch size 0 length zero empty input",
    "how-to/export/#prompts-of-different-lengths": (
        "prompt prompts ragged padded batch cache different lengths past_lengths"
    ),
    "how-to/export/#put-the-graph-into-a-larger-model": (
        "merge compose combine subgraph larger existing existing insert models"
    ),
    "how-to/export/#save-it-and-run-it-in-python": "save model inferencesession session",
    "how-to/export-a-layer/#your-own-function-with-a-cache": "ndonnx",
    "how-to/export-a-layer/#use-torchs-exporter": "torch.onnx.export dynamo",
    "how-to/frameworks/#flax": "flax equinox keras",
    "how-to/gradients/#second-derivatives-without-a-framework": (
        "newton hessian conjugate second order optimizer"
    ),
    "how-to/log-sum-exp/": "logsumexp loss losses",
    "how-to/log-sum-exp/#cross-entropy-over-many-classes": "cross entropy vocabulary softmax loss linear fused",
    "how-to/log-sum-exp/#contrastive-losses": "infonce clip simclr contrastive loss",
    "how-to/log-sum-exp/#kernels": (
        "kde density mean-shift meanshift nadaraya watson regression bandwidth "
        "sinkhorn optimal transport ot wasserstein"
    ),
    "how-to/gradients/": "gradient gradients backward backprop autograd backpropagation",
    "how-to/gradients/#train-a-layer": "train multi layer torch loop adam optimizer optimiser sgd",
    "how-to/long-sequences/": "long out oom memory complexity quadratic",
    "how-to/long-sequences/#drop-tokens-and-take-them-back": "beam search speculative decoding drafts rejected",
    "how-to/long-sequences/#long-sequences-in-a-graph": "graph exported onnx long memory sequence",
    "how-to/long-sequences/#many-machines": "distributed cluster machines parallel",
    "how-to/install/": (
        "install installation setup pip quickstart python python version dependencies optional extras download "
        "github pypi big package venv virtual environment"
    ),
    "how-to/masks/": "mask mask",
    "how-to/masks/#an-array": "np.tril tril boolean nothing floating",
    "how-to/masks/#a-rule-of-your-own": "custom mask",
    "how-to/masks/#causal": "causal mask autoregressive triangular stop seeing future look ahead lookahead",
    "how-to/masks/#documents": "document mask packing packed block",
    "how-to/masks/#more-keys-than-queries": "lower right upper left alignment",
    "how-to/masks/#padding": "padding mask sentences variable different lengths pad batch sequences",
    "how-to/masks/#padding-on-the-left": "padding left",
    "how-to/masks/#prefix-lm": "prefix lm",
    "how-to/masks/#sliding-window": "sliding window windows swa local",
    "how-to/masks/#where-true-means-ignore": "true false inverted",
    "how-to/masks/#what-a-mask-saves": "sparse sparsity attention",
    "how-to/named-models/": "named models variants",
    "how-to/named-models/#deepseek-latent-attention": "mla deepseek latent",
    "how-to/named-models/#deepseek-sparse-attention": "dsa indexer",
    "how-to/named-models/#nsa-compressed-keys-chosen-blocks-a-window": "nsa",
    "how-to/named-models/#gpt-oss-sinks": "gpt-oss gpt_oss sink",
    "how-to/named-models/#fox-forgetting-gates": "fox forgetting gate gates",
    "how-to/named-models/#differential-attention": "differential diff",
    "how-to/named-models/#moba-chosen-blocks": "moba",
    "how-to/named-models/#natten-neighbourhoods": "natten neighborhood neighbourhood",
    "how-to/named-models/#medusa-trees": "medusa",
    "how-to/port/": "port migrate",
    "how-to/port/#flash-attention": "flash flash_attn",
    "how-to/port/#flexattention": "flex flexattention score_mod mask_mod block_mask",
    "how-to/port/#jaxnn": "jax",
    "how-to/port/#torch": "torch pytorch",
    "how-to/frameworks/": "bert gemma gpt gpt2 huggingface hugging face llama lora peft mistral transformers",
    "how-to/torch-decoder/": "golden",
    "how-to/verify/": "verify check",
    "how-to/verify/#if-a-model-disagrees": ("verification disagree disagrees fail fails failed failure debug"),
    "how-to/verify/#in-ci": "ci json pytest pipeline continuous integration github actions",
    "how-to/verify/#where-each-node-ran": "fallback falls back cpu node placement",
    "how-to/verify/#write-a-report": "report html json",
    "playground/": "play try demo online own sentence",
    "project/changelog/": "release notes changes",
    "project/#contributing": (
        "contribute contributing first change source tree layout code repository structure architecture where"
    ),
    "project/#run-the-tests": "make check tests pytest --backends",
    "project/": ("semver stable stable versioning policy semver api stability"),
    "project/#citation": "cite citation bibtex",
    "project/#deprecation": "deprecationwarning deprecated deprecation policy",
    "project/#what-is-supported": (
        "supports windows macos linux arm apple aarch64 licence license minimum version"
    ),
    "reference/": "reference",
    "reference/#glossary": (
        "glossary embedding logit token sink d_model prefill feed forward mlp residual softmax "
        "tokens provider opset tiled tiled primitive multi_head grouped_query transformer transformer encoder"
    ),
    "reference/attention/#dropout": "dropout dropout_p seed",
    "reference/attention/#grouped-query-attention": "gqa mqa grouped enable_gqa",
    "reference/attention/#sdpa_xp.attention_scores": "scores",
    "reference/attention/#sdpa_xp.attention_state": "lse logsumexp log sum exp",
    "reference/attention/#sdpa_xp.attention_weights": "weights",
    "reference/attention/#sdpa_xp.attention_statistics": "statistics entropy topk key_sums row_max max_logit",
    "reference/attention/#sdpa_xp.ring_attention": "ring",
    "reference/attention/#sdpa_xp.explain": "explain reason",
    "reference/attention/#sdpa_xp.merge_states": "merge states",
    f"reference/attention/#sdpa_xp.{SDPA}": (
        f"{SDPA} scaled dot product attention sdpa softcap sinks attn_mask is_causal scale"
    ),
    "reference/support/#benchmarks": "benchmark speed speed performance tokens 4096 4,096 decode",
    "reference/masks/#biases": "bias biases",
    "reference/masks/#sdpa_xp.biases.alibi": "alibi",
    "reference/masks/#sdpa_xp.biases.relative": "relative position t5",
    "reference/caches/": "kv cache caching",
    "reference/caches/#sdpa_xp.PagedKVCache": "paged pagedattention",
    "reference/caches/#sdpa_xp.varlen_attention": "varlen ragged jagged cu_seqlens",
    "reference/command-line/": "cli command line terminal",
    "reference/command-line/#export": "such option options",
    "reference/command-line/#exit-codes": "exit code codes",
    "reference/contract/#inputs-and-outputs": "subclass subclasses memmap masked array broadcast",
    "reference/contract/#masks-and-scores": "order",
    "reference/contract/#special-numbers": "infinity special numbers fully masked",
    "reference/errors/": "error errors errors exception message must troubleshoot troubleshooting messages",
    "reference/errors/#pythons-own-messages": (
        "typeerror missing required positional argument misnamed keyword takes given arguments"
    ),
    "reference/errors/#exporter": "export_attention valueerror",
    "reference/errors/#shapes": "shape shapes mismatch mismatched error attn_mask.shape",
    "reference/errors/#imports": "importerror modulenotfounderror module named",
    "reference/errors/#libraries-devices-dtypes": "arrays one library",
    "reference/errors/#my-output-is-nan": "nan inf loss",
    "reference/errors/#onnxruntime": (
        "invalid_argument invalid dimensions unexpected unsupported domain_version failed ir "
        "scatterelements op registered seqlens_k"
    ),
    "reference/layers/": "layer layers",
    "reference/layers/#sdpa_xp.layers.MultiHeadAttention": "mha multi multihead multiheadattention",
    "reference/masks/": "masks",
    "reference/plot/": "plot plt.show picture figure matplotlib nothing appears",
    "reference/layers/#positions": "positional embedding positional encoding",
    "reference/layers/#sdpa_xp.positional.Rotary": "rope rotary",
    "reference/support/": "support matrix supported libraries support",
    "reference/support/#the-forms": "opset opsets each form",
    "how-to/install/#examples": (
        "example layer layernorm norm norm block block block transformer transformer rnn lstm cnn convolution"
    ),
    "tutorials/decoder-with-a-cache/": "decoding decoder decoder",
    "tutorials/formula-to-layer/#where-the-formula-fails": "softmax overflow underflow inf",
    "tutorials/decoder-with-a-cache/#generate": (
        "generate generation text sampling sample greedy temperature top-k top"
    ),
    "tutorials/first-attention-map/": (
        "started beginner tutorial notebook notebooks colab attention map heatmap visualize visualise self "
        "cross attend attends"
    ),
    "tutorials/first-attention-map/#three-words": "row color colour mean weights sum sum",
    "tutorials/formula-to-layer/#heads": "embed_dim num_heads dim head heads",
    "tutorials/first-attention-map/#what-attention-changes": "same word different meaning",
    "tutorials/formula-to-layer/": "scratch",
    "tutorials/formula-to-layer/#the-formula": ("formula softmax einsum query key value qkv"),
    "tutorials/formula-to-layer/#why-divide-by-e": (
        "sqrt sqrt(d_k) divide scaling square root divided sqrt(d) saturation saturate "
        "variance why scale scale vanishing vanishing vanishing gradient"
    ),
    "tutorials/train-in-numpy/": "train training learning rate",
    "tutorials/train-in-numpy/#descend": "gradient descent descend learning rate sgd update step",
    "tutorials/train-in-numpy/#the-loss-and-its-gradients": "loss down decrease",
}
"""By the address of a page or a section, in lower case. Words outweigh titles; repeated ones weigh more."""

STOP = {"a", "from", "is", "of", "to"}
"""Parts of names that are words of a question."""
FORMULA = re.compile(r"\\[(\[](.*?)\\[)\]]", re.DOTALL)
COMMAND = re.compile(r"\\(?:mathrm|operatorname|text|left|right|quad|qquad|frac)\b|\\[,;! ]|[{}]")
NAME = re.compile(r"#(?:sdpa_xp\.)?(?P<path>(?!.*\b_[a-z])\w+(?:\.\w+)*)$")
PRIVATE = re.compile(r"#sdpa_xp\w*\.(?:\w+\.)*_[a-z]\w*\.")
"""The address of an object in a private module."""
ATTRIBUTE = re.compile(r"<pre><code>\w+:")
"""How the text of an attribute begins. `Run.rows` must not answer "rows without keys" before a page does."""
CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def write(site: Path) -> None:
    """Add the fields to the index of a built site, and the full name of each object as its title."""
    path = site / "search" / "search_index.json"
    index = json.loads(path.read_text())
    missing = WORDS.keys() - {entry["location"] for entry in index["docs"]}
    if missing:
        raise ValueError(f"search_words.py names places that the site does not have: {sorted(missing)}")
    index["docs"] = [
        entry | {"text": without_latex(entry["text"])} | added(entry)
        for entry in without_private(index["docs"])
    ]
    path.write_text(json.dumps(index, separators=(",", ":")))


def without_private(docs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries without those whose address names a private module: their text joins their page's."""
    shown = {entry["location"]: dict(entry) for entry in docs if not PRIVATE.search(entry["location"])}
    for entry in docs:
        page = shown.get(entry["location"].partition("#")[0])
        if entry["location"] not in shown and page is not None:
            page["text"] += f"<p>{entry['title']}</p>{entry['text']}"
    return list(shown.values())


def without_latex(text: str) -> str:
    """Return a text with each formula as a result of the search can show it."""

    def plain(formula: re.Match[str]) -> str:
        return " ".join(COMMAND.sub(" ", formula[1]).replace("\\", "").split())

    return FORMULA.sub(plain, text)


def added(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that an entry of the index gets."""
    fields: dict[str, Any] = {}
    name = NAME.search(entry["location"]) if "#sdpa_xp" in entry["location"] else None
    if name:
        names = name["path"].split(".")
        pieces = [piece for word in names for piece in (word, *CAMEL.findall(word))]
        parts = dict.fromkeys(piece for piece in map(str.lower, pieces) if piece not in STOP)
        # A query's word finds each name that begins with it, and "is" in "what is a mask" means no name.
        known = "" if names[-1].startswith("is_") else names[-1]
        fields = {"title": name["path"], "name": known, "parts": " ".join(parts)}
        if ATTRIBUTE.match(entry["text"]):
            fields["boost"] = 0.01
    if entry["location"] in WORDS:
        fields["words"] = WORDS[entry["location"]]
    return fields
