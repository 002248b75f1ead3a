// Matmuls of sorted rows in every format that is not GGUF, the gradients of the matrices and biases of experts, and the
// tiles that these launches share.

GROUPED_KERNEL(f32, Plain<float>)
GROUPED_KERNEL(bf16, Plain<bf16>)
GROUPED_KERNEL(f16, Plain<f16>)
GROUPED_KERNEL(int8, Int8Rows)
GROUPED_KERNEL(fp8, Fp8<false>)
GROUPED_KERNEL(fp8_blocks, Fp8<true>)
GROUPED_KERNEL(bnb4, Bnb4<false>)
GROUPED_KERNEL(bnb4_nested, Bnb4<true>)

// Where the rows of each expert begin, the first tile of each, and the expert of each tile. One block.
extern "C" __global__ void __launch_bounds__(256)
    group_tiles(const i32 *sorted, i32 rows, i32 experts, i32 *offsets, i32 *first_tiles, i32 *tiles, i32 tile_count) {
    for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
        i32 low = 0, high = rows;
        while (low < high) {
            const i32 middle = low + (high - low) / 2;
            if (sorted[middle] < e)
                low = middle + 1;
            else
                high = middle;
        }
        offsets[e] = low;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        i32 sum = 0;
        for (int e = 0; e < experts; ++e) {
            first_tiles[e] = sum;
            sum += ceil_div(offsets[e + 1] - offsets[e], GROUP_ROWS);
        }
        first_tiles[experts] = sum;
    }
    __syncthreads();
    for (int tile = threadIdx.x; tile < tile_count; tile += blockDim.x) {
        // The last expert whose first tile is not behind this one.
        i32 low = 0, high = experts;
        while (low < high) {
            const i32 middle = low + (high - low) / 2;
            if (first_tiles[middle + 1] <= tile)
                low = middle + 1;
            else
                high = middle;
        }
        tiles[tile] = low < experts ? low : -1;
    }
}

// dW += scale·dyᵀ·x over the rows of each expert: a block has 64 rows of its matrix and 64 columns.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
    grouped_weight_grad(const act *dy, i64 dy_stride, i32 n, const act *x, i64 x_stride, i32 k, float scale,
                        i32 rows_of_expert, i32 first, float *dw, i64 dw_stride, const i32 *offsets) {
    const i32 expert = blockIdx.z, begin = offsets[expert], end = offsets[expert + 1];
    if (begin == end)
        return;
    const i32 first_n = blockIdx.y * GROUP_ROWS, first_k = blockIdx.x * GROUP_COLUMNS;
    const i32 ns = min(n - first_n, GROUP_ROWS), ks = min(k - first_k, GROUP_COLUMNS);
    GroupTiles &tiles = group_tiles_of_block();
    GroupSums sums = {};
    for (i32 row = begin; row < end; row += GROUP_DEPTH) {
        const i32 here = min(end - row, GROUP_DEPTH);
        load_rows_turned(tiles.left, dy + row * dy_stride + first_n, dy_stride, here, ns);
        load_rows_turned(tiles.right, x + row * x_stride + first_k, x_stride, here, ks);
        __syncthreads();
        multiply_tiles(tiles, sums);
        __syncthreads();
    }
    float *to = dw + ((i64)expert * rows_of_expert + first + first_n) * dw_stride + first_k;
    write_tile(sums, [&](int row, int column, float sum) {
        if (row < ns && column < ks)
            to[row * dw_stride + column] += scale * sum;
    });
}

// dbias += Σ dy over the rows of each expert; a thread has a column.
extern "C" __global__ void __launch_bounds__(256)
    grouped_bias_grad(const act *dy, i64 dy_stride, i32 n, i32 rows_of_expert, i32 first, float *dbias,
                      const i32 *offsets) {
    const i32 column = blockIdx.x * blockDim.x + threadIdx.x, expert = blockIdx.y;
    if (column >= n)
        return;
    float sum = 0.0f;
    for (i32 row = offsets[expert]; row < offsets[expert + 1]; ++row)
        sum += to_float(dy[row * dy_stride + column]);
    dbias[(i64)expert * rows_of_expert + first + column] += sum;
}
