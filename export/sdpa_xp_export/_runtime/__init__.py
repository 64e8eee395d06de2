"""onnxruntime: what is known of its releases, sessions that run a model, and the memory that a run takes."""
