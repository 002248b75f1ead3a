// Matmuls of sorted rows with GGUF blocks, whose formats are in `decode_gguf.cu`.

GROUPED_KERNEL(q4_0, Q4_0)
GROUPED_KERNEL(q4_1, Q4_1)
GROUPED_KERNEL(q5_0, Q5_0)
GROUPED_KERNEL(q5_1, Q5_1)
GROUPED_KERNEL(q8_0, Q8_0)
GROUPED_KERNEL(q4_k, Q4K)
GROUPED_KERNEL(q5_k, Q5K)
GROUPED_KERNEL(q6_k, Q6K)
