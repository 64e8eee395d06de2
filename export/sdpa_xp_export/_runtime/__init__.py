"""onnxruntime and other engines: what is known of their releases, and sessions that run a model.

releases       what was measured of each release
session        graphs of our own, in this process
process        a process for a model that anyone wrote, with `limits`: `child`, `worker`, `frames`
engine, readers   what a session is, and the session of each engine
"""
