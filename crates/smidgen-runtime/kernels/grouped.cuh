// Matmuls of rows that are sorted by expert with the matrices of their experts: one launch for all experts. This text is
// prepended to the kernel files of the formats.
//
// A block has a tile of 64 rows of one expert and 64 columns. `group_tiles` finds where the rows of each expert begin and
// which expert a tile belongs to, on the device, so that the host never waits for counts; a grid has a tile for each 64
// rows and one more for each expert, and blocks without rows end at once. Both operands of a step of 32 of the depth are
// copied to shared memory as (row, depth) and (column, depth), the stored matrix decoded by its format. 16-bit operands
// are multiplied by `matrix_unit.cuh`, f32 by ordinary instructions. Every element is summed by one block in the order of
// the depth.

#define GROUP_ROWS 64
#define GROUP_COLUMNS 64
#define GROUP_DEPTH 32
#define GROUP_STRIDE (GROUP_DEPTH + 8)
#define GROUP_THREADS 128

// Shared memory of a block: both tiles.
struct GroupTiles {
    act left[GROUP_ROWS * GROUP_STRIDE];
    act right[GROUP_COLUMNS * GROUP_STRIDE];
};

// Part of a result of a thread. 16-bit: a warp has 32 x 32, as two A by four B. f32: a thread has 8 x 4.
struct GroupSums {
    float at[2][4][4];
};

__device__ __forceinline__ GroupTiles &group_tiles_of_block() {
    extern __shared__ __align__(1024) uint4 shared_arena[];
    return *(GroupTiles *)shared_arena;
}

__device__ __forceinline__ void multiply_tiles(const GroupTiles &tiles, GroupSums &sums) {
#if defined(ACT_F32)
    const int row = threadIdx.x / 16 * 8, column = threadIdx.x % 16 * 4;
    for (int k = 0; k < GROUP_DEPTH; ++k) {
        float right[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            right[j] = tiles.right[(column + j) * GROUP_STRIDE + k];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float left = tiles.left[(row + i) * GROUP_STRIDE + k];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                sums.at[i / 4][i % 4][j] = fmaf(left, right[j], sums.at[i / 4][i % 4][j]);
        }
    }
#else
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row = warp % 2 * 32, column = warp / 2 * 32, matrix = lane / 8, in_matrix = lane % 8;
    const u32 left = shared_base(), right = left + (u32)sizeof(tiles.left);
#pragma unroll
    for (int k = 0; k < GROUP_DEPTH; k += 16) {
        u32 a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int from_row = row + 16 * i + matrix % 2 * 8 + in_matrix, from_k = k + matrix / 2 * 8;
            load_matrices(a[i], left + (from_row * GROUP_STRIDE + from_k) * (u32)sizeof(act));
        }
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            u32 b[4];
            const int from_column = column + 16 * pair + matrix / 2 * 8 + in_matrix, from_k = k + matrix % 2 * 8;
            load_matrices(b, right + (from_column * GROUP_STRIDE + from_k) * (u32)sizeof(act));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                multiply_add(sums.at[i][2 * pair], a[i], b[0], b[1]);
                multiply_add(sums.at[i][2 * pair + 1], a[i], b[2], b[3]);
            }
        }
    }
#endif
}

// Calls `write(row, column, sum)` for every element of the tile that this thread has.
template <typename Write> __device__ __forceinline__ void write_tile(const GroupSums &sums, Write write) {
#if defined(ACT_F32)
    const int row = threadIdx.x / 16 * 8, column = threadIdx.x % 16 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            write(row + i, column + j, sums.at[i / 4][i % 4][j]);
#else
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row = warp % 2 * 32 + lane / 4, column = warp / 2 * 32 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int at = 0; at < 4; ++at)
                write(row + 16 * i + at / 2 * 8, column + 8 * j + at % 2, sums.at[i][j][at]);
#endif
}

// The tile of rows of activations, 32 of their columns; zeros beyond `rows` and `columns`.
__device__ __forceinline__ void load_rows(act *tile, const act *from, i64 stride, i32 rows, i32 columns, bool aligned) {
    for (int group = threadIdx.x; group < GROUP_ROWS * (GROUP_DEPTH / 8); group += GROUP_THREADS) {
        const int row = group / (GROUP_DEPTH / 8), column = group % (GROUP_DEPTH / 8) * 8;
        const act *at = from + row * stride + column;
        float x[8] = {};
        if (row < rows && column + 8 <= columns && aligned) {
            load_eight<act>(at, x);
        } else if (row < rows) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                x[i] = column + i < columns ? to_float(at[i]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            tile[row * GROUP_STRIDE + column + i] = to_act(x[i]);
    }
}

// The same, with the rows as depth: 32 rows and 64 columns.
__device__ __forceinline__ void load_rows_turned(act *tile, const act *from, i64 stride, i32 rows, i32 columns) {
    for (int at = threadIdx.x; at < GROUP_DEPTH * GROUP_COLUMNS; at += GROUP_THREADS) {
        const int row = at / GROUP_COLUMNS, column = at % GROUP_COLUMNS;
        const bool exists = row < rows && column < columns;
        tile[column * GROUP_STRIDE + row] = exists ? from[row * stride + column] : to_act(0.0f);
    }
}

// Part of a stored matrix: `rows` by `columns` from (first_row, first_column) on. As stored, its rows are the columns of the
// tile (64) and its columns the depth (32); turned, the reverse.
template <typename Format>
__device__ __forceinline__ void load_matrix(act *tile, const Format &format, i64 first_row, i32 first_column, i32 rows,
                                            i32 columns, bool turned, bool aligned) {
    const int wide = turned ? GROUP_COLUMNS / 8 : GROUP_DEPTH / 8;
    for (int group = threadIdx.x; group < GROUP_DEPTH * GROUP_COLUMNS / 8; group += GROUP_THREADS) {
        const int row = group / wide, column = group % wide * 8;
        float x[8] = {};
        if (row < rows && column + 8 <= columns && aligned) {
            format.expand(format.read(first_row + row, first_column + column), x);
        } else if (row < rows) {
#pragma unroll 1
            for (int i = 0; i < 8; ++i)
                if (column + i < columns)
                    x[i] = format.one(first_row + row, first_column + column + i);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int at = turned ? (column + i) * GROUP_STRIDE + row : row * GROUP_STRIDE + column + i;
            tile[at] = to_act(x[i]);
        }
    }
}

struct Grouped {
    const act *left; // sorted rows
    i64 left_stride;
    i32 left_aligned;
    Source source;
    i64 source_row;    // the first row of the matrix in its tensor
    i32 source_aligned;
    i32 rows_of_expert; // P
    i32 first;          // the first row that is used of each expert's matrix
    i32 rows;           // how many
    i32 turned;         // dx = d·W instead of y = x·Wᵀ
    act *to;
    i64 to_stride;
    i32 columns; // of the result
    i32 adds;    // to what is in `to`
    float scale;
    const void *bias; // (E·P), or null
    i32 bias_type;
    const i32 *offsets;     // (E + 1): where the rows of each expert begin
    const i32 *first_tiles; // (E + 1): the first tile of each expert
    const i32 *tiles;       // the expert of each tile, or -1
};

template <typename Format> __device__ __forceinline__ void grouped_matmul(const Grouped &grouped) {
    const Format format(grouped.source);
    const i32 expert = grouped.tiles[blockIdx.y];
    if (expert < 0)
        return;
    const i32 first_row = grouped.offsets[expert] + ((i32)blockIdx.y - grouped.first_tiles[expert]) * GROUP_ROWS;
    const i32 rows = min(grouped.offsets[expert + 1] - first_row, GROUP_ROWS);
    const i32 first_column = blockIdx.x * GROUP_COLUMNS;
    const i32 columns = min(grouped.columns - first_column, GROUP_COLUMNS);
    const i64 of_expert = (i64)expert * grouped.rows_of_expert + grouped.first;
    const i64 stored_row = grouped.source_row + of_expert;
    const i32 depth = grouped.turned ? grouped.rows : grouped.source.columns;
    GroupTiles &tiles = group_tiles_of_block();
    GroupSums sums = {};
    for (i32 k = 0; k < depth; k += GROUP_DEPTH) {
        const i32 here = min(depth - k, GROUP_DEPTH);
        const act *left = grouped.left + first_row * grouped.left_stride + k;
        load_rows(tiles.left, left, grouped.left_stride, rows, here, grouped.left_aligned);
        if (grouped.turned)
            load_matrix(tiles.right, format, stored_row + k, first_column, here, columns, true, grouped.source_aligned);
        else
            load_matrix(tiles.right, format, stored_row + first_column, k, columns, here, false,
                        grouped.source_aligned);
        __syncthreads();
        multiply_tiles(tiles, sums);
        __syncthreads();
    }
    write_tile(sums, [&](int row, int column, float sum) {
        if (row >= rows || column >= columns)
            return;
        act *to = grouped.to + (first_row + row) * grouped.to_stride + first_column + column;
        float y = grouped.scale * sum;
        if (grouped.bias)
            y += stored_float(grouped.bias, grouped.bias_type, of_expert + first_column + column);
        if (grouped.adds)
            y += to_float(*to);
        *to = to_act(y);
    });
}

#define GROUPED_KERNEL(NAME, ...)                                                                                      \
    extern "C" __global__ void __launch_bounds__(GROUP_THREADS) grouped_##NAME(Grouped grouped) {                      \
        grouped_matmul<__VA_ARGS__>(grouped);                                                                          \
    }
