"""What config.json says of the layers of a model. Without torch.

family: what a model family is, and what most of them read of config.json in the same way
registry: which family a config.json is of; architectures that are refused stand in refused

llama: Llama, and Mistral, Mixtral, Phi 3, Seed-OSS, SmolLM 3, EuroBERT and Granite, which differ from it in little
llama4: Llama 4
qwen: Qwen 2 and 3, and their mixtures
qwen_hybrid: Qwen 3.5 and Qwen3-Next, most of whose layers are gated delta nets
gemma: Gemma 1, 2 and 3
gemma4: Gemma 4
glm: GLM 4, and its mixtures from 4.5 on
olmo: OLMo 2 and 3, OLMoE, EXAONE 4, and Cohere's Command R, R+, R7B and A: norms elsewhere than Llama's
deepseek: models with latent attention: DeepSeek-V2 and V3, GLM-4.7-Flash, MiniCPM 3
mistral: Ministral 3, Mistral Small 4 and Large 3
gpt_oss: gpt-oss
mixtures: MiniMax M2, MiMo-V2-Flash, Hunyuan 3 and Laguna: experts chosen by sigmoids
pictures: models of pictures and text
renamed: models whose layers are another family's under a class of their own

encoders: what an encoder is, which one a config.json describes, and how it is read
head_spec: what stands behind the pooled hidden state of a model, as its folder describes it
layer_spec: what one layer of a model is
raw_config: values of a config.json, checked as they are read
refused: architectures that nothing here can serve, by name
towers: what config.json says of the towers that look at pictures
vision_spec: what looks at pictures, and what it is built from
rope_config: how positions are rotated, as config.json says it in one of two spellings
"""
