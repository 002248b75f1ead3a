// The gradient of an embedding table: dtable[ids[t]] += dy[t] * scale, t ascending, with the same bits as the CPU in
// f32. A block has one token and some columns. The block of the first token with an id adds all tokens with that id,
// in order. Every other block finds an earlier token with its id and exits, so no two blocks add to the same row.
// The row `padding` (-1: none) is left out.
// Reading the ids again for each token is T * T * 4 bytes from the cache, which is small compared to the table.
// Left out: the forward pass, which is `decode.cu` with ids.

#define EMBED_THREADS 256
#define EMBED_COLUMNS 4

extern "C" __global__ void __launch_bounds__(EMBED_THREADS)
    embed_grad(const i32 *ids, i32 tokens, const act *dy, i64 dy_stride, i32 columns, float scale, float *dtable,
               i32 table_rows, i32 padding) {
    __shared__ u32 matches[EMBED_THREADS / WARP];
    const i32 token = blockIdx.x;
    const i32 id = ids[token];
    if ((u32)id >= (u32)table_rows || id == padding)
        return;
    bool earlier = false;
    for (i32 at = threadIdx.x; at < token; at += EMBED_THREADS)
        earlier |= ids[at] == id;
    if (__syncthreads_or(earlier))
        return;

    float *row = dtable + (i64)id * columns;
    const i32 first = blockIdx.y * (EMBED_THREADS * EMBED_COLUMNS) + threadIdx.x;
    float sums[EMBED_COLUMNS];
#pragma unroll
    for (int at = 0; at < EMBED_COLUMNS; ++at) {
        const i32 column = first + at * EMBED_THREADS;
        sums[at] = column < columns ? row[column] : 0.0f;
    }
    for (i32 base = token; base < tokens; base += EMBED_THREADS) {
        const i32 mine = base + (i32)threadIdx.x;
        const u32 ballot = __ballot_sync(EVERY_LANE, mine < tokens && ids[mine] == id);
        if (threadIdx.x % WARP == 0)
            matches[threadIdx.x / WARP] = ballot;
        __syncthreads();
        for (int warp = 0; warp < EMBED_THREADS / WARP; ++warp) {
            for (u32 left = matches[warp]; left != 0; left &= left - 1) {
                const act *from = dy + (i64)(base + warp * WARP + __ffs((int)left) - 1) * dy_stride;
#pragma unroll
                for (int at = 0; at < EMBED_COLUMNS; ++at) {
                    const i32 column = first + at * EMBED_THREADS;
                    if (column < columns)
                        sums[at] = __fadd_rn(sums[at], __fmul_rn(to_float(from[column]), scale));
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int at = 0; at < EMBED_COLUMNS; ++at) {
        const i32 column = first + at * EMBED_THREADS;
        if (column < columns)
            row[column] = sums[at];
    }
}
