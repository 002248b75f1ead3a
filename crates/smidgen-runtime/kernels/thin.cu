// The matmuls of an adapter. One matrix is wide (T, N), and the others have only R rows or columns. The wide matrix is
// read once and the rest is small, so reading the wide matrix takes nearly all of the time.
//   sums over tokens     D (N, R) or (R, N) += scale · wideᵀ·thin
//   matmuls              h (T, R) = wide · A, with A stored as (R, N) or as (N, R)
//   both at once         the gradients of an adapter y = … + h·(scale·B)ᵀ: dB += scale · dyᵀ·h, and dh = dy·(scale·B),
//                        where the 16-bit copy of B that the kernel reads is already multiplied by scale
// A block processes a range of tokens and a range of columns. Partial sums go to the workspace, and `thin_total` adds
// them in a fixed order, so that results are deterministic. Ranges depend on planned sizes. A shorter micro-batch omits
// the last ranges, and only sums that were written are added.
//
// Tiles of 16 KiB of the wide matrix go through a pipeline in shared memory, in chunks of 16 bytes that are swizzled
// as in `attention_tiles.cuh`. Rows are aligned to 16 bytes, columns and ranks are multiples of 8 (R at most 64), and
// ranks are padded with zeros to RANK in shared memory.
// Left out: f32, other ranks and other alignments, which cuBLASLt handles. `matrix_unit.cuh` comes before this text.

#if !defined(ACT_F32)

// The number of tiles in the pipeline. Without asynchronous copies two are enough, and a block may use less shared
// memory.
constexpr int stages_of(int rank) { return CAPABILITY < 80 ? 2 : rank == 16 ? 4 : 3; }

// Columns that a warp sums over tokens.
#define WARP_COLUMNS 64
// Elements of a tile of the wide matrix.
#define TILE_ELEMENTS 8192
#define TILE_BYTES (TILE_ELEMENTS * 2)

// Byte offset of a chunk of 8 elements in a tile with rows of COLUMNS elements. The same chunk of eight neighbouring
// rows is in eight different groups of banks.
template <int COLUMNS> __device__ __forceinline__ u32 place_of(int row, int chunk) {
    constexpr int CHUNKS = COLUMNS / 8;
    constexpr int SWIZZLED = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
    return row * (COLUMNS * 2) + ((chunk ^ (row / (8 / SWIZZLED) % SWIZZLED)) * 16);
}

// Starts to copy a tile whose first element is at `from`. Elements beyond `rows` and `columns` are filled with zeros.
template <int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void copy_tile(u32 tile, const act *from, i64 stride, int rows, int columns) {
    constexpr int CHUNKS = COLUMNS / 8, ALL = ROWS * CHUNKS;
#if CAPABILITY >= 80
#pragma unroll
    for (int first = 0; first < ALL; first += THREADS) {
        const int index = first + threadIdx.x, row = index / CHUNKS, chunk = index % CHUNKS;
        if (ALL % THREADS == 0 || index < ALL)
            copy_async_16(tile + place_of<COLUMNS>(row, chunk), from + row * stride + chunk * 8,
                          row < rows && chunk * 8 < columns);
    }
#else
    copy_all_16<(ALL + THREADS - 1) / THREADS>([&](int pass, u32 &to, const uint4 *&source) {
        const int index = pass * THREADS + threadIdx.x, row = index / CHUNKS, chunk = index % CHUNKS;
        to = tile + place_of<COLUMNS>(row, chunk);
        if (row < rows && chunk * 8 < columns)
            source = (const uint4 *)(from + row * stride + chunk * 8);
        return index < ALL;
    });
#endif
}

// ── sums over tokens, and the gradients of an adapter ────────────────────────────────────────────

// The destination of sums: those of range i begin at i · range_stride. With `adds` there is a single range, and its
// sums are added to the gradient directly.
struct SumPlaces {
    float *sums;
    i64 range_stride, row_stride;
    // Whether the sums are (R, N) rather than (N, R).
    int across;
    int adds;
    float scale;
};

__device__ __forceinline__ void put_sums(const SumPlaces &to, int column, int rank, float x, float y) {
    float *at = to.sums + blockIdx.y * to.range_stride;
    const i64 next = to.across ? to.row_stride : 1;
    at += to.across ? rank * to.row_stride + column : column * to.row_stride + rank;
    if (to.adds) {
        at[0] += to.scale * x;
        at[next] += to.scale * y;
    } else if (to.across) {
        at[0] = x;
        at[next] = y;
    } else {
        *(float2 *)at = make_float2(x, y);
    }
}

template <int WARPS, int RANK> struct TokenTiles {
    static constexpr int THREADS = WARPS * WARP;
    static constexpr int COLUMNS = WARPS * WARP_COLUMNS;
    static constexpr int TOKENS = TILE_ELEMENTS / COLUMNS;
    static constexpr int STAGES = stages_of(RANK);
    static constexpr u32 STAGE_BYTES = TILE_BYTES + TOKENS * RANK * 2;
    // The result fragments of a tile of tokens, and the bytes of one warp's part of them.
    static constexpr int FRAGMENTS = TOKENS / 16 * (RANK / 8);
    static constexpr u32 PART_BYTES = FRAGMENTS * 512;
    // A double buffer for the parts of all warps: one is filled while the other is summed.
    static constexpr u32 EXCHANGE_BYTES = 2 * WARPS * PART_BYTES;
};

// Adds the warps' parts of a tile of the matmul and writes the sum to (rows, rank) of this block's columns.
template <int WARPS, int RANK>
__device__ __forceinline__ void add_parts(u32 parts, float *matmul_parts, int token, int last, int rank) {
    using Tiles = TokenTiles<WARPS, RANK>;
#pragma unroll
    for (int first = 0; first < Tiles::FRAGMENTS * 64; first += Tiles::THREADS) {
        const int index = first + threadIdx.x, fragment = index / 64, lane = index / 2 % 32;
        if (Tiles::FRAGMENTS * 64 % Tiles::THREADS != 0 && index >= Tiles::FRAGMENTS * 64)
            continue;
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            const float2 part = shared_load_floats(parts + warp * Tiles::PART_BYTES + index * 8);
            sum.x += part.x, sum.y += part.y;
        }
        const int row = token + fragment / (RANK / 8) * 16 + lane / 4 + index % 2 * 8;
        const int column = fragment % (RANK / 8) * 8 + lane % 4 * 2;
        if (row < last && column < rank)
            *(float2 *)(matmul_parts + (i64)row * rank + column) = sum;
    }
}

// A block processes column range blockIdx.x and token range blockIdx.y. A warp sums its 64 columns over all of these
// tokens in registers. With MATMUL it also computes wide · right over its 64 columns, with `right` (columns, rank) in
// registers. The parts of the warps are added through shared memory, one tile later, and written to `matmul_parts`
// (blocks, rows, rank).
template <int WARPS, int RANK, bool MATMUL>
__device__ __forceinline__ void sum_tokens(const act *wide, i64 wide_stride, const act *thin, i64 thin_stride,
                                           const act *right, i64 right_stride, int rows, int columns, int rank,
                                           int range_tokens, float *matmul_parts, const SumPlaces &to) {
    using Tiles = TokenTiles<WARPS, RANK>;
    constexpr int COLUMNS = Tiles::COLUMNS, TOKENS = Tiles::TOKENS, STAGES = Tiles::STAGES, N = RANK / 8;
    constexpr int BLOCKS_OF_16 = WARP_COLUMNS / 16;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_column = blockIdx.x * COLUMNS, first = blockIdx.y * range_tokens;
    const int last = min(first + range_tokens, rows), tiles = ceil_div(last - first, TOKENS);
    const u32 exchange = shared_base(), stages = exchange + (MATMUL ? Tiles::EXCHANGE_BYTES : 0);
    const act *from = wide + first * wide_stride + first_column;
    if (MATMUL)
        matmul_parts += (i64)blockIdx.x * rows * rank;

    auto copy = [&](int tile) {
        const u32 stage = stages + tile % STAGES * Tiles::STAGE_BYTES;
        const int done = tile * TOKENS, left = last - first - done;
        copy_tile<TOKENS, COLUMNS, Tiles::THREADS>(stage, from + done * wide_stride, wide_stride, left,
                                                   columns - first_column);
        copy_tile<TOKENS, RANK, Tiles::THREADS>(stage + TILE_BYTES, thin + (first + done) * thin_stride,
                                                thin_stride, left, rank);
    };

    if (MATMUL) {
        static_assert(COLUMNS * RANK * 2 <= Tiles::EXCHANGE_BYTES, "the right operand passes through the exchange");
        copy_tile<COLUMNS, RANK, Tiles::THREADS>(exchange, right + first_column * right_stride, right_stride,
                                                 columns - first_column, rank);
        copy_async_commit();
    }
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile) {
        if (tile < tiles)
            copy(tile);
        copy_async_commit();
    }
    // The warp's columns of `right` as right operands, each for 16 summed columns and N times 8 ranks.
    u32 b[MATMUL ? BLOCKS_OF_16 : 1][MATMUL ? N : 1][2];
    if (MATMUL) {
        copy_async_wait<STAGES - 1>();
        __syncthreads();
#pragma unroll
        for (int j = 0; j < BLOCKS_OF_16; ++j)
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                u32 m[4];
                const int row = warp * WARP_COLUMNS + j * 16 + lane % 16;
                load_matrices_transposed(m, exchange + place_of<RANK>(row, n + lane / 16));
                b[j][n][0] = m[0], b[j][n][1] = m[1];
                b[j][n + 1][0] = m[2], b[j][n + 1][1] = m[3];
            }
    }

    float sums[BLOCKS_OF_16][N][4] = {};
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        copy_async_wait<STAGES - 2>();
        // Now this tile has arrived for all threads, and all threads are done with the previous tile.
        __syncthreads();
        if (tile + STAGES - 1 < tiles)
            copy(tile + STAGES - 1);
        copy_async_commit();
        if (MATMUL && tile > 0)
            add_parts<WARPS, RANK>(exchange + (tile - 1) % 2 * (WARPS * Tiles::PART_BYTES), matmul_parts,
                                   first + (tile - 1) * TOKENS, last, rank);
        const u32 stage = stages + tile % STAGES * Tiles::STAGE_BYTES, thin_tile = stage + TILE_BYTES;
        const u32 part = exchange + (tile % 2 * WARPS + warp) * Tiles::PART_BYTES + lane * 16;
#pragma unroll
        for (int m = 0; m < TOKENS / 16; ++m) {
            // The thin rows as right operands, each for 16 summed tokens.
            u32 h[N][2];
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                u32 x[4];
                load_matrices_transposed(x, thin_tile + place_of<RANK>(m * 16 + lane % 16, n + lane / 16));
                h[n][0] = x[0], h[n][1] = x[1];
                h[n + 1][0] = x[2], h[n + 1][1] = x[3];
            }
            float c[N][4] = {};
#pragma unroll
            for (int j = 0; j < BLOCKS_OF_16; ++j) {
                const int chunk = warp * (WARP_COLUMNS / 8) + j * 2;
                u32 a[4];
                // 16 columns, which are the rows of the left operand.
                load_matrices_transposed(
                    a, stage + place_of<COLUMNS>(m * 16 + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2));
#pragma unroll
                for (int n = 0; n < N; ++n)
                    multiply_add(sums[j][n], a, h[n][0], h[n][1]);
                if (MATMUL) {
                    load_matrices(a, stage + place_of<COLUMNS>(m * 16 + lane % 16, chunk + lane / 16));
#pragma unroll
                    for (int n = 0; n < N; ++n)
                        multiply_add(c[n], a, b[j][n][0], b[j][n][1]);
                }
            }
            if (MATMUL) {
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const u32 bits[4] = {__float_as_uint(c[n][0]), __float_as_uint(c[n][1]), __float_as_uint(c[n][2]),
                                         __float_as_uint(c[n][3])};
                    shared_store_16(part + (m * N + n) * 512, bits);
                }
            }
        }
    }
    if (MATMUL) {
        __syncthreads();
        add_parts<WARPS, RANK>(exchange + (tiles - 1) % 2 * (WARPS * Tiles::PART_BYTES), matmul_parts,
                               first + (tiles - 1) * TOKENS, last, rank);
    }
    copy_async_wait<0>();
#pragma unroll
    for (int j = 0; j < BLOCKS_OF_16; ++j)
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int column = first_column + warp * WARP_COLUMNS + j * 16 + lane / 4, at = n * 8 + lane % 4 * 2;
            if (at < rank && column < columns)
                put_sums(to, column, at, sums[j][n][0], sums[j][n][1]);
            if (at < rank && column + 8 < columns)
                put_sums(to, column + 8, at, sums[j][n][2], sums[j][n][3]);
        }
}

// The partial sums of dh (column blocks, rows, rank) and of dB (ranges, columns, rank). Grid: column blocks, ranges of
// tokens that have rows. Dynamic shared memory: EXCHANGE_BYTES + STAGES · STAGE_BYTES.
#define ADAPTER_GRAD(COLUMNS, RANK, BLOCKS)                                                                            \
    extern "C" __global__ void __launch_bounds__(COLUMNS / 2, BLOCKS) adapter_grad_##COLUMNS##_##RANK(                 \
        const act *dy, i64 dy_stride, const act *h, i64 h_stride, const act *b, i64 b_stride, int rows, int columns,   \
        int rank, int range_tokens, float *matmul_parts, float *sums, i64 range_stride, i64 row_stride, int adds,      \
        float scale) {                                                                                                 \
        sum_tokens<COLUMNS / WARP_COLUMNS, RANK, true>(dy, dy_stride, h, h_stride, b, b_stride, rows, columns, rank,   \
                                                       range_tokens, matmul_parts,                                     \
                                                       SumPlaces{sums, range_stride, row_stride, 0, adds, scale});     \
    }

ADAPTER_GRAD(256, 16, 2)
ADAPTER_GRAD(256, 32, 2)
ADAPTER_GRAD(512, 16, 2)
ADAPTER_GRAD(512, 32, 1)

// The partial sums of wideᵀ·thin, (ranges, columns, rank) or, if `across`, (ranges, rank, columns). Grid: column
// blocks, ranges of tokens that have rows. Dynamic shared memory: STAGES · STAGE_BYTES.
#define THIN_SUMS(RANK)                                                                                                \
    extern "C" __global__ void __launch_bounds__(128, 2)                                                               \
        thin_sums_##RANK(const act *wide, i64 wide_stride, const act *thin, i64 thin_stride, int rows, int columns,    \
                         int rank, int range_tokens, float *sums, i64 range_stride, i64 row_stride, int across,        \
                         int adds, float scale) {                                                                      \
        sum_tokens<4, RANK, false>(wide, wide_stride, thin, thin_stride, nullptr, 0, rows, columns, rank,              \
                                   range_tokens, nullptr,                                                              \
                                   SumPlaces{sums, range_stride, row_stride, across, adds, scale});                    \
    }

THIN_SUMS(16)
THIN_SUMS(32)
THIN_SUMS(64)

// ── matmuls with a thin matrix ───────────────────────────────────────────────────────────────────

#define MATMUL_THREADS 128

template <int RANK> struct MatmulTiles {
    // Groups of 16 tokens per warp: the thin matrix is read from shared memory once for all of them.
    static constexpr int M = RANK <= 32 ? 1 : 2;
    static constexpr int TOKENS = 64 * M;
    static constexpr int COLUMNS = TILE_ELEMENTS / TOKENS;
    static constexpr int STAGES = stages_of(RANK);
    static constexpr u32 STAGE_BYTES = TILE_BYTES + COLUMNS * RANK * 2;
};

// A block processes the columns blockIdx.x and the tokens blockIdx.y. The thin matrix is (rank, columns) if BY_ROWS,
// else (columns, rank). If there are several column ranges, sums go to (ranges, rows, rank) in `parts`.
template <int RANK, bool BY_ROWS>
__device__ __forceinline__ void thin_matmul(const act *wide, i64 wide_stride, const act *thin, i64 thin_stride, int rows,
                                             int columns, int rank, int range_columns, float *parts, act *output,
                                             i64 output_stride) {
    using Tiles = MatmulTiles<RANK>;
    constexpr int M = Tiles::M, TOKENS = Tiles::TOKENS, COLUMNS = Tiles::COLUMNS, STAGES = Tiles::STAGES, N = RANK / 8;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_column = blockIdx.x * range_columns, token = blockIdx.y * TOKENS;
    const int last_column = min(first_column + range_columns, columns);
    const int tiles = ceil_div(last_column - first_column, COLUMNS);
    const u32 stages = shared_base();
    const act *from = wide + token * wide_stride;

    auto copy = [&](int tile) {
        const u32 stage = stages + tile % STAGES * Tiles::STAGE_BYTES;
        const int column = first_column + tile * COLUMNS, left = last_column - column;
        copy_tile<TOKENS, COLUMNS, MATMUL_THREADS>(stage, from + column, wide_stride, rows - token, left);
        if (BY_ROWS)
            copy_tile<RANK, COLUMNS, MATMUL_THREADS>(stage + TILE_BYTES, thin + column, thin_stride, rank, left);
        else
            copy_tile<COLUMNS, RANK, MATMUL_THREADS>(stage + TILE_BYTES, thin + column * thin_stride, thin_stride,
                                                      left, rank);
    };

#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile) {
        if (tile < tiles)
            copy(tile);
        copy_async_commit();
    }
    float c[M][N][4] = {};
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        if (tile + STAGES - 1 < tiles)
            copy(tile + STAGES - 1);
        copy_async_commit();
        const u32 stage = stages + tile % STAGES * Tiles::STAGE_BYTES, thin_tile = stage + TILE_BYTES;
#pragma unroll
        for (int step = 0; step < COLUMNS / 16; ++step) {
            u32 a[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m) {
                const int row = (warp * M + m) * 16 + lane % 16;
                load_matrices(a[m], stage + place_of<COLUMNS>(row, step * 2 + lane / 16));
            }
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                u32 b[4];
                if (BY_ROWS)
                    load_matrices(b, thin_tile + place_of<COLUMNS>(n * 8 + lane % 8 + lane / 16 * 8,
                                                                   step * 2 + lane / 8 % 2));
                else
                    load_matrices_transposed(b, thin_tile + place_of<RANK>(step * 16 + lane % 16, n + lane / 16));
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    multiply_add(c[m][n], a[m], b[0], b[1]);
                    multiply_add(c[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
    copy_async_wait<0>();
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = token + (warp * M + m) * 16 + half * 8 + lane / 4, at = n * 8 + lane % 4 * 2;
                const float x = c[m][n][2 * half], y = c[m][n][2 * half + 1];
                if (row >= rows || at >= rank)
                    continue;
                if (parts != nullptr)
                    *(float2 *)(parts + ((i64)blockIdx.x * rows + row) * rank + at) = make_float2(x, y);
                else
                    *(u32 *)(output + row * output_stride + at) = pack_two<act>(x, y);
            }
}

// Grid: column ranges, blocks of tokens that have rows. Dynamic shared memory: STAGES · STAGE_BYTES.
#define THIN_MATMUL(RANK, FORM, BY_ROWS)                                                                               \
    extern "C" __global__ void __launch_bounds__(MATMUL_THREADS, 2) thin_matmul_##FORM##_##RANK(                       \
        const act *wide, i64 wide_stride, const act *thin, i64 thin_stride, int rows, int columns, int rank,           \
        int range_columns, float *parts, act *output, i64 output_stride) {                                             \
        thin_matmul<RANK, BY_ROWS>(wide, wide_stride, thin, thin_stride, rows, columns, rank, range_columns, parts,    \
                                    output, output_stride);                                                            \
    }

THIN_MATMUL(16, of_rows, true)
THIN_MATMUL(32, of_rows, true)
THIN_MATMUL(64, of_rows, true)
THIN_MATMUL(16, of_columns, false)
THIN_MATMUL(32, of_columns, false)
THIN_MATMUL(64, of_columns, false)

// ── the total of the parts ───────────────────────────────────────────────────────────────────────

// Parts (count, rows, width) in f32, `stride` elements apart; `width` is a multiple of 4.
struct Parts {
    const float *first;
    int count;
    i64 stride;
    int rows, width;
};

// Each quarter of a block adds every fourth part, so that many loads are pending. Then the quarters are added.
#define TOTAL_THREADS 256
#define TOTAL_FOURS (TOTAL_THREADS / 4)
// Loads that a thread starts at a time.
#define LOADS 8

__device__ __forceinline__ void add(float4 &sum, float4 x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }

// The total of four neighbouring elements, in the threads of the first quarter.
__device__ __forceinline__ float4 total_of(const Parts &parts, u32 four, bool exists, float4 *quarters) {
    const int quarter = threadIdx.x / TOTAL_FOURS;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 sum = zero;
    const float *from = parts.first + (i64)four * 4;
#pragma unroll 1
    for (int first = quarter; first < parts.count; first += 4 * LOADS) {
        float4 loaded[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int part = first + 4 * i;
            loaded[i] = exists && part < parts.count ? *(const float4 *)(from + part * parts.stride) : zero;
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            add(sum, loaded[i]);
    }
    quarters[threadIdx.x] = sum;
    __syncthreads();
    if (quarter == 0) {
#pragma unroll
        for (int other = 1; other < 4; ++other)
            add(sum, quarters[threadIdx.x + other * TOTAL_FOURS]);
    }
    return sum;
}

// gradient += scale · the total of the sums, and output = the total of the matmul parts, rounded. The first
// `sum_blocks` blocks handle the gradient, the others the output; each block handles 64 groups of four elements.
extern "C" __global__ void __launch_bounds__(TOTAL_THREADS, 4)
    thin_total(const float *sums, int ranges, i64 range_stride, int rows, int width, float *gradient,
               i64 gradient_stride, float scale, int sum_blocks, const float *matmul_parts, int matmul_ranges,
               i64 matmul_stride, int matmul_rows, int matmul_width, act *output, i64 output_stride) {
    __shared__ float4 quarters[TOTAL_THREADS];
    const bool of_sums = (int)blockIdx.x < sum_blocks, writes = threadIdx.x < TOTAL_FOURS;
    const Parts parts{of_sums ? sums : matmul_parts, of_sums ? ranges : matmul_ranges,
                      of_sums ? range_stride : matmul_stride, of_sums ? rows : matmul_rows,
                      of_sums ? width : matmul_width};
    const u32 block = of_sums ? blockIdx.x : blockIdx.x - sum_blocks, fours = parts.width / 4;
    const u32 four = block * TOTAL_FOURS + threadIdx.x % TOTAL_FOURS, row = four / fours, column = four % fours * 4;
    const bool exists = row < (u32)parts.rows;
    float4 *at = (float4 *)(gradient + row * gradient_stride + column);
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    // Loaded early, because it does not depend on the parts.
    if (of_sums && exists && writes)
        x = *at;
    const float4 total = total_of(parts, four, exists, quarters);
    if (!exists || !writes)
        return;
    if (of_sums)
        *at = make_float4(x.x + scale * total.x, x.y + scale * total.y, x.z + scale * total.z, x.w + scale * total.w);
    else
        *(uint2 *)(output + row * output_stride + column) =
            make_uint2(pack_two<act>(total.x, total.y), pack_two<act>(total.z, total.w));
}

#endif
