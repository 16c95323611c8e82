"""What config.json says of the layers of a model, one file a family. Without torch.

Beside what they share, a file each: cohere, cohere2, deepseek_v2, deepseek_v3, eurobert, exaone4, gemma, gemma2,
gemma3, glm, glm4_moe, glm4_moe_lite, gpt_oss, granite, granite_moe, llama, minicpm3, mistral, mixtral, olmo, olmoe,
phi3, qwen2, qwen2_moe, qwen3, qwen3_moe, seed_oss, smollm3.

encoder_spec: what an encoder is
encoders: which encoder a config.json describes, and how it is read
family: what a model family is, and what most of them read of config.json in the same way
head_spec: what stands behind the pooled hidden state of a model, as its folder describes it
layer_spec: what one layer of a model is
raw_config: values of a config.json, checked as they are read
refused: architectures that nothing here can serve, by name
registry: which family a config.json is of
rope_config: how positions are rotated, as config.json says it in one of two spellings
"""
