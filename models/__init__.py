"""Decoder models as plain pytrees, and the loading of their weights.

Reading order: config (what a model is), llama (the decoder) with layers, params (one declaration of
every parameter), loader (load_model) with the two formats weights_gguf and weights_hf, registry.
"""
