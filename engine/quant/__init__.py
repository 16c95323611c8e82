"""How the matrices of a checkpoint are stored, plain or quantised, and the products with them.

auto_round: AutoRound checkpoints
awq: AWQ as AutoAWQ's gemm version stores it
bitsandbytes: checkpoints of bitsandbytes: NF4, FP4, int8
claims: whether a checkpoint's configuration and its files agree that it is quantised
codes: a quantised matrix as every format is decoded to
compressed_ints: compressed-tensors' integers for weights alone
compressed_tensors: compressed-tensors, as llm-compressor writes it
config_groups: config_groups of compressed-tensors
decoded: what a format makes of the tensors of a matrix
experts: experts whose matrices keep the codes that the checkpoint has, multiplied on the CPU
format: what a checkpoint's way to store a matrix has to say, and where it is asked from
fp4: 4-bit floats e2m1, two in a byte
fp8: 8-bit floats
ggml_types: the types that a GGUF file stores tensors in
gguf_blocks: the block formats of ggml as codes, scales and minima
gguf_scheme: which modules of a GGUF file are quantised, and how
gptq: GPTQ checkpoints
headers: what the files' headers say of one module's tensors, and what a configuration's lists of names mean
hqq: HQQ checkpoints
int8: whole numbers a byte each, as compressed-tensors stores them for products with 8-bit inputs (INT8 W8A8)
integers: what the integer formats share
kv_scales: the scales of a checkpoint for keys and values in a cache of 8 bits, under all the names that they have
    had
matrix: products with a quantised matrix
method: a Linear whose parts the checkpoint stores quantised, each in its own way
methods: the names of quantisations
modelopt: NVIDIA's model optimizer
online: matrices of a 16-bit checkpoint, quantised as they are loaded
packed: a quantised matrix on a GPU
packed_experts: experts on a GPU whose codes are packed as its kernels read them, expert by expert as they come
products: products with numbers in 16 bit
quantize: matrices quantised on the way in
quark: AMD's Quark
scales: the scales of a matrix
scheme: which quantisation a model is served with
settings: values of a checkpoint's quantization_config that the integer formats are set by
staging: weights from a mapped file to the GPU, through pinned memory
unpack: codes out of packed words
unquantized: products with weights as they are, in the activations' dtype
weights: where weights live, how tensor parallelism divides them, and what the loader asks of a module that holds
    some
"""
