// Shared by the forward and backward kernels of attention: the list of tiles that blocks process, and tiles in shared
// memory.
//
// A tile is some tokens of one segment. Segment boundaries are on the device, so a grid has as many blocks as there
// can be tiles, and one block writes the list of actual tiles, those with the most work first.
// A tile in shared memory consists of rows of HEAD 16-bit elements (HEAD: the head size, padded with zeros). The
// 16-byte chunks of a row are swizzled so that the same chunk of 8 neighbouring rows is in 8 different groups of banks.
// So matrix loads and 16-byte copies have no bank conflicts, without padding.
// Kernels on tiles need rows aligned to 16 bytes and head sizes that are multiples of 8. For other shapes, and for f32,
// each kernel has a plain form in which a warp processes one row after the other.
// Left out: the kernels (`attention.cu`, `attention_grad.cu`). HEAD is defined before this text.

#define THREADS 128
// Warps that share their queries or keys, because the registers of one cannot hold all channels of the result. Each
// computes all scores, and a part of the channels.
#define SHARERS (HEAD > 256 ? 2 : 1)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

#define JOIN_NAMES(a, b) a##b
#define JOIN(a, b) JOIN_NAMES(a, b)
// The name of a kernel that is compiled for one padded head size.
#define FOR_HEAD(name) JOIN(name, HEAD)

// How scores are scaled, capped and masked.
struct Scores {
    // Head size, at most HEAD.
    int head_dim;
    // The number of keys that a query sees, including its own; 2^30 if there is no window.
    int window;
    float scale;
    // A score s becomes cap · tanh(s / cap), unless `cap` is 0.
    float cap;
};

// A tile: tokens `first` to `last` - 1 of the segment of tokens `begin` to `end` - 1.
struct Tile {
    int begin, end, first, last;
};

// ── the list of tiles ────────────────────────────────────────────────────────────────────────────
// An int4 whose x is the number of tiles, then (begin, end, first, last) of each tile.

#define BUCKETS 1024

// One block writes the list of tiles of `rows` tokens. The work of a tile of queries grows with its position in the
// segment, the work of a tile of keys (`of_keys`) shrinks. Tiles are sorted into buckets of about equal work, the most
// work first. The order inside a bucket varies from run to run, which changes the block of a tile but no result.
__device__ __noinline__ void list_tiles(const i32 *boundaries, int segments, int tokens, int rows, int of_keys,
                                        int4 *list) {
    __shared__ int place[BUCKETS];
    __shared__ int part_sums[BUCKETS / 32];
    __shared__ int2 batch[THREADS];
    const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    int shift = 0;
    while (((tokens - 1) / rows >> shift) >= BUCKETS)
        ++shift;
    for (int bucket = thread; bucket < BUCKETS; bucket += THREADS)
        place[bucket] = 0;
    // The first round counts the tiles of each bucket, the second writes them.
    for (int round = 0; round < 2; ++round) {
        for (int first = 0; first < segments; first += THREADS) {
            __syncthreads();
            batch[thread] = make_int2(0, 0);
            if (first + thread < segments)
                batch[thread] = make_int2(boundaries[first + thread], boundaries[first + thread + 1]);
            __syncthreads();
            for (int segment = warp; segment < min(THREADS, segments - first); segment += THREADS / WARP) {
                const int begin = batch[segment].x, end = batch[segment].y;
                const int tiles = (end - begin + rows - 1) / rows;
                for (int work = lane; work < tiles; work += WARP) {
                    const int at = atomicAdd(&place[work >> shift], 1);
                    const int token = begin + (of_keys ? tiles - 1 - work : work) * rows;
                    if (round == 1)
                        list[1 + at] = make_int4(begin, end, token, min(token + rows, end));
                }
            }
        }
        __syncthreads();
        if (round == 1)
            break;
        // Replaces counts by first positions: the sum of all buckets with more work.
        const int own = BUCKETS / THREADS;
        int counts[own], sum = 0;
        for (int i = 0; i < own; ++i) {
            counts[i] = place[BUCKETS - 1 - (thread * own + i)];
            sum += counts[i];
        }
        int before = sum;
        for (int distance = 1; distance < WARP; distance *= 2) {
            const int other = __shfl_up_sync(EVERY_LANE, before, distance);
            if (lane >= distance)
                before += other;
        }
        if (lane == WARP - 1)
            part_sums[warp] = before;
        __syncthreads();
        before -= sum;
        for (int i = 0; i < warp; ++i)
            before += part_sums[i];
        for (int i = 0; i < own; ++i) {
            place[BUCKETS - 1 - (thread * own + i)] = before;
            before += counts[i];
        }
        if (thread == THREADS - 1)
            list[0] = make_int4(before, 0, 0, 0);
    }
    __syncthreads();
}

__device__ __forceinline__ bool read_tile(const int4 *list, int index, Tile &tile) {
    if (index >= list[0].x)
        return false;
    const int4 entry = list[1 + index];
    tile = Tile{entry.x, entry.y, entry.z, entry.w};
    return true;
}

// Reads a part of a listed tile, which is cut into PARTS tiles of ROWS tokens.
template <int PARTS, int ROWS> __device__ __forceinline__ bool read_part(const int4 *list, int index, Tile &tile) {
    if (!read_tile(list, index / PARTS, tile))
        return false;
    if (PARTS == 1)
        return true;
    tile.first += index % PARTS * ROWS;
    tile.last = min(tile.last, tile.first + ROWS);
    return tile.first < tile.last;
}

// ── rows in registers, for the plain kernels ─────────────────────────────────────────────────────

// A lane has every 32nd channel of a row.
#define OWN ((HEAD + WARP - 1) / WARP)

__device__ __forceinline__ void read_row(float (&row)[OWN], const act *from, int head_dim) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int channel = threadIdx.x % WARP + i * WARP;
        row[i] = channel < head_dim ? to_float(from[channel]) : 0.0f;
    }
}

__device__ __forceinline__ void write_row(act *to, const float (&row)[OWN], float factor, int head_dim) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int channel = threadIdx.x % WARP + i * WARP;
        if (channel < head_dim)
            to[channel] = to_act(row[i] * factor);
    }
}

__device__ __forceinline__ float dot(const float (&a)[OWN], const float (&b)[OWN]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        sum = fmaf(a[i], b[i], sum);
    return warp_sum(sum);
}

#if !defined(ACT_F32)
// ── tiles in shared memory ───────────────────────────────────────────────────────────────────────

#define CHUNKS (HEAD / 8)
// The number of neighbouring chunks that the swizzle permutes.
#define SWIZZLED (CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2)
#define ROW_BYTES (HEAD * 2)

// The number that the chunk offsets of a row, in bytes, are xored with.
__device__ __forceinline__ u32 row_swizzle(int row) { return (row / (8 / SWIZZLED)) % SWIZZLED * 16; }

__device__ __forceinline__ u32 place_in_tile(int row, int chunk) {
    return row * ROW_BYTES + ((chunk * 16) ^ row_swizzle(row));
}

// Lanes that copy one row, and rows that a block copies at once.
#define ROW_LANES (HEAD <= 64 ? 8 : HEAD <= 128 ? 16 : HEAD <= 256 ? 32 : 64)
#define COPIED_ROWS (THREADS / ROW_LANES)

// The first row and the chunk that this thread copies; it copies the same chunk of every COPIED_ROWS-th row.
struct CopyPlace {
    int row, chunk;
    bool in_tile, in_head;
};

__device__ __forceinline__ CopyPlace copy_place(int head_dim) {
    const int chunk = threadIdx.x % ROW_LANES;
    return CopyPlace{(int)threadIdx.x / ROW_LANES, chunk, chunk < CHUNKS, chunk * 8 < head_dim};
}

// The thread's first element of a tile that begins at `token`, in the head that begins at `column`.
__device__ __forceinline__ const act *copy_source(const act *from, i64 stride, int token, int column, CopyPlace place) {
    return from + (token + place.row) * stride + (column + place.chunk * 8);
}

// Starts to copy a tile of ROWS rows. Rows from `rows` on and columns beyond the head are filled with zeros.
template <int ROWS>
__device__ __forceinline__ void load_tile(u32 tile, const act *source, i64 stride, int rows, CopyPlace place) {
    static_assert(ROWS % COPIED_ROWS == 0, "whole passes");
    if (!place.in_tile)
        return;
#if CAPABILITY >= 80
#pragma unroll
    for (int pass = 0; pass < ROWS / COPIED_ROWS; ++pass) {
        const int row = place.row + pass * COPIED_ROWS;
        copy_async_16(tile + place_in_tile(row, place.chunk), source, place.in_head && row < rows);
        source += COPIED_ROWS * stride;
    }
#else
    copy_all_16<ROWS / COPIED_ROWS>([&](int pass, u32 &to, const uint4 *&from) {
        const int row = place.row + pass * COPIED_ROWS;
        to = tile + place_in_tile(row, place.chunk);
        if (place.in_head && row < rows)
            from = (const uint4 *)(source + pass * COPIED_ROWS * stride);
        return true;
    });
#endif
}

// One warp writes `rows` rows of a tile from `first_row` on to global memory, `count` chunks of each from `chunk` on.
// `to` is the first element of the head in the first row.
__device__ __forceinline__ void store_rows(act *to, i64 stride, u32 tile, int first_row, int rows, int chunk,
                                           int count, int head_dim) {
#pragma unroll 1
    for (int i = threadIdx.x % WARP; i < rows * count; i += WARP) {
        const int row = i / count, at = chunk + i % count;
        if (at * 8 < head_dim) {
            u32 words[4];
            shared_load_16(words, tile + place_in_tile(first_row + row, at));
            *(uint4 *)(to + row * stride + at * 8) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

// Writes a C fragment of 16 rows and 8 columns (one chunk) to a tile, times a factor for each half of the rows.
__device__ __forceinline__ void put_fragment(u32 tile, int row, int chunk, const float (&c)[4], float upper,
                                             float lower) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    shared_store_4(tile + place_in_tile(row + g, chunk) + t * 4, pack_two<act>(c[0] * upper, c[1] * upper));
    shared_store_4(tile + place_in_tile(row + g + 8, chunk) + t * 4, pack_two<act>(c[2] * lower, c[3] * lower));
}

// The offsets at which this lane reads a fragment of a tile. The rows passed to the loads below must be multiples of 8,
// so that the swizzle of a lane is always the same.
struct LanePlaces {
    // For A, and for B with rows as the summed dimension: row lane % 16, chunk lane / 16.
    u32 by_16, by_16_swizzle;
    // For B with rows as columns of the result: row lane % 8 + lane / 16 · 8, chunk lane / 8 % 2.
    u32 by_8, by_8_swizzle;
};

__device__ __forceinline__ LanePlaces lane_places() {
    const int lane = threadIdx.x % WARP;
    const int row = lane % 8 + lane / 16 * 8;
    return LanePlaces{(u32)(lane % 16) * ROW_BYTES, (lane / 16 * 16) ^ row_swizzle(lane % 16), (u32)row * ROW_BYTES,
                      (lane / 8 % 2 * 16) ^ row_swizzle(row)};
}

// A (16, 16): rows `row`.., elements 16 · step.. of a tile.
__device__ __forceinline__ void load_left(u32 (&a)[4], u32 tile, const LanePlaces &lane, int row, int step) {
    load_matrices(a, tile + lane.by_16 + row * ROW_BYTES + ((u32)(step * 32) ^ lane.by_16_swizzle));
}

// Two B (16, 8) of tileᵀ: columns are the rows `row`.. and `row` + 8..; the sum is over elements 16 · step...
__device__ __forceinline__ void load_right_rows(u32 (&b)[4], u32 tile, const LanePlaces &lane, int row, int step) {
    load_matrices(b, tile + lane.by_8 + row * ROW_BYTES + ((u32)(step * 32) ^ lane.by_8_swizzle));
}

// Two B (16, 8) of a tile: columns are the chunks `chunk` (even) and `chunk` + 1; the sum is over the rows `row`...
__device__ __forceinline__ void load_right(u32 (&b)[4], u32 tile, const LanePlaces &lane, int row, int chunk) {
    load_matrices_transposed(b, tile + lane.by_16 + row * ROW_BYTES + ((u32)(chunk * 16) ^ lane.by_16_swizzle));
}

// c = left·rightᵀ over the head: rows `left_row`.. of one tile, `right_row`.. of the other.
template <int M, int N>
__device__ __forceinline__ void tile_matmul(float (&c)[M][N][4], u32 left, int left_row, u32 right, int right_row,
                                             const LanePlaces &lane) {
    static_assert(N % 2 == 0, "right fragments come in pairs");
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                c[m][n][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < HEAD / 16; ++step) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m)
            load_left(a[m], left, lane, left_row + m * 16, step);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 b[4];
            load_right_rows(b, right, lane, right_row + n * 8, step);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                multiply_add(c[m][n], a[m], b[0], b[1]);
                multiply_add(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// c += a·tile: `a` is 16 columns, summed over the rows `row`.. of the tile; N chunks from `chunk` on.
template <int M, int N>
__device__ __forceinline__ void add_matmul(float (&c)[M][N][4], const u32 (&a)[M][4], u32 tile, int row, int chunk,
                                            const LanePlaces &lane) {
    static_assert(N % 2 == 0, "right fragments come in pairs");
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        u32 b[4];
        load_right(b, tile, lane, row, chunk + n);
#pragma unroll
        for (int m = 0; m < M; ++m) {
            multiply_add(c[m][n], a[m], b[0], b[1]);
            multiply_add(c[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// Columns 16 · step.. of a result, rounded, as the left operand of another matmul.
template <int M, int N>
__device__ __forceinline__ void as_left(u32 (&a)[M][4], const float (&c)[M][N][4], int step) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
        a[m][0] = pack_two<act>(c[m][2 * step][0], c[m][2 * step][1]);
        a[m][1] = pack_two<act>(c[m][2 * step][2], c[m][2 * step][3]);
        a[m][2] = pack_two<act>(c[m][2 * step + 1][0], c[m][2 * step + 1][1]);
        a[m][3] = pack_two<act>(c[m][2 * step + 1][2], c[m][2 * step + 1][3]);
    }
}
#endif
