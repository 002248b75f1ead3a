// What the forward and backward kernels of attention share: the list of tiles that blocks work through, tiles
// in shared memory, and which scores are seen.
//
// A tile is some tokens of one segment. Only the device knows the segments, so a grid has as many blocks as
// there can be tiles, and one block lists the tiles there are, the longest work first.
// A tile in shared memory is rows of HEAD elements of 16 bits (HEAD: the head size, padded with zeros), in
// chunks of 16 bytes that are permuted within a row so that 8 neighbouring rows of one chunk lie in 8 different
// groups of banks: matrix loads and 16-byte copies are free of conflicts without padding.
// Leaves out the products themselves (`attention.cu`, `attention_grad.cu`). HEAD is defined before this text.

#define THREADS 128
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

#define JOIN_NAMES(a, b) a##b
#define JOIN(a, b) JOIN_NAMES(a, b)
// The name of a kernel that is compiled for one padded head size.
#define FOR_HEAD(name) JOIN(name, HEAD)

// What a score goes through, and how operands lie.
struct Scores {
    // Head size, at most HEAD.
    int head_dim;
    // A query sees so many keys, itself included; 2^30 is all.
    int window;
    float scale;
    // Scores s become cap · tanh(s / cap); 0 is never.
    float cap;
    // Rows of all operands begin at multiples of 16 bytes, and the head size is a multiple of 8.
    int aligned;
};

// A tile of a segment: tokens `first` to `last` - 1 of `begin` to `end` - 1.
struct Tile {
    int begin, end, first, last;
};

// ── the list of tiles ────────────────────────────────────────────────────────────────────────────
// An int4 whose x is the number of tiles, then (begin, end, first, last) of each.

#define BUCKETS 1024

// One block writes the list of tiles of `rows` tokens. A query tile's work grows with its place in the segment,
// a key tile's falls (`of_keys`): buckets of equal work, the longest first. The order inside a bucket is
// that of arrival: it moves work between blocks and changes no result.
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
    // First count, then place.
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
        // Counts become first places: the sum of all buckets of more work.
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

#if !defined(ACT_F32)
// ── tiles in shared memory ───────────────────────────────────────────────────────────────────────

#define CHUNKS (HEAD / 8)
// Chunks that are permuted among themselves, and rows that share a permutation.
#define SWIZZLED (CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2)
#define ROW_BYTES (HEAD * 2)

// The exclusive-or of a row's chunks, in bytes.
__device__ __forceinline__ u32 row_swizzle(int row) { return (row / (8 / SWIZZLED)) % SWIZZLED * 16; }

__device__ __forceinline__ u32 place_in_tile(int row, int chunk) {
    return row * ROW_BYTES + ((chunk * 16) ^ row_swizzle(row));
}

// Begins to copy rows 0 to `rows` - 1 of a head to a tile of ROWS rows; what is beyond becomes zero. `from` is
// the first row's first element of the head. Where rows are not aligned the copy is done when it returns.
template <int ROWS>
__device__ __forceinline__ void load_tile(u32 tile, const act *from, i64 stride, int rows, const Scores &scores) {
    const int thread = threadIdx.x;
    if (!scores.aligned) {
#pragma unroll 1
        for (int i = thread; i < ROWS * HEAD; i += THREADS) {
            const int row = i / HEAD, column = i % HEAD;
            u16 bits = 0;
            if (row < rows && column < scores.head_dim)
                bits = from[row * stride + column].bits;
            shared_store_2(tile + place_in_tile(row, column / 8) + column % 8 * 2, bits);
        }
        return;
    }
    if constexpr (THREADS % CHUNKS == 0) {
        // A thread keeps its chunk.
        constexpr int STEP = THREADS / CHUNKS;
        static_assert(ROWS % STEP == 0, "whole passes");
        const int row = thread / CHUNKS, chunk = thread % CHUNKS;
        const bool exists = chunk * 8 < scores.head_dim;
        from += row * stride + chunk * 8;
#pragma unroll
        for (int pass = 0; pass < ROWS / STEP; ++pass) {
            const int at = row + pass * STEP;
            copy_async_16(tile + place_in_tile(at, chunk), from, exists && at < rows);
            from += STEP * stride;
        }
    } else {
        static_assert(ROWS * CHUNKS % THREADS == 0, "whole passes");
#pragma unroll
        for (int pass = 0; pass < ROWS * CHUNKS / THREADS; ++pass) {
            const int i = thread + pass * THREADS, row = i / CHUNKS, chunk = i % CHUNKS;
            copy_async_16(tile + place_in_tile(row, chunk), from + row * stride + chunk * 8,
                          chunk * 8 < scores.head_dim && row < rows);
        }
    }
}

// Writes `count` chunks from `chunk` on of rows 0 to `rows` - 1 of a tile, by one warp. `to` is the first
// row's first element of the head.
__device__ __forceinline__ void store_rows(act *to, i64 stride, u32 tile, int first_row, int rows, int chunk,
                                           int count, const Scores &scores) {
    const int lane = threadIdx.x % WARP;
    if (scores.aligned) {
#pragma unroll 1
        for (int i = lane; i < rows * count; i += WARP) {
            const int row = i / count, at = chunk + i % count;
            if (at * 8 < scores.head_dim) {
                u32 words[4];
                shared_load_16(words, tile + place_in_tile(first_row + row, at));
                *(uint4 *)(to + row * stride + at * 8) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    } else {
#pragma unroll 1
        for (int i = lane; i < rows * count * 8; i += WARP) {
            const int row = i / (count * 8), column = chunk * 8 + i % (count * 8);
            if (column < scores.head_dim) {
                const u32 place = place_in_tile(first_row + row, column / 8) + column % 8 * 2;
                to[row * stride + column].bits = shared_load_2(tile + place);
            }
        }
    }
}

// Writes a C fragment of 16 rows and 8 columns (one chunk), times a factor for each half, to a tile.
__device__ __forceinline__ void put_fragment(u32 tile, int row, int chunk, const float (&c)[4], float upper,
                                             float lower) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    shared_store_4(tile + place_in_tile(row + g, chunk) + t * 4, pack_two<act>(c[0] * upper, c[1] * upper));
    shared_store_4(tile + place_in_tile(row + g + 8, chunk) + t * 4, pack_two<act>(c[2] * lower, c[3] * lower));
}

// Where this lane reads in a tile for a fragment. The rows given to the reads below must be multiples of 8,
// so a lane's permutation is always the same.
struct LanePlaces {
    // For A of rows, and for B = rows as the summed dimension: row lane % 16, chunk lane / 16.
    u32 by_16, by_16_swizzle;
    // For B = rows as columns of the result: row lane % 8 + lane / 16 · 8, chunk lane / 8 % 2.
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

// Two B (16, 8) of tileᵀ: columns are the rows `row`.. and `row` + 8.., summed are elements 16 · step...
__device__ __forceinline__ void load_right_rows(u32 (&b)[4], u32 tile, const LanePlaces &lane, int row, int step) {
    load_matrices(b, tile + lane.by_8 + row * ROW_BYTES + ((u32)(step * 32) ^ lane.by_8_swizzle));
}

// Two B (16, 8) of a tile: summed are the rows `row`.., columns are the chunks `chunk` (even) and `chunk` + 1.
__device__ __forceinline__ void load_right(u32 (&b)[4], u32 tile, const LanePlaces &lane, int row, int chunk) {
    load_matrices_transposed(b, tile + lane.by_16 + row * ROW_BYTES + ((u32)(chunk * 16) ^ lane.by_16_swizzle));
}

// c = left·rightᵀ over the head: rows `left_row`.. of one tile, `right_row`.. of the other.
template <int M, int N>
__device__ __forceinline__ void tile_product(float (&c)[M][N][4], u32 left, int left_row, u32 right, int right_row,
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
__device__ __forceinline__ void add_product(float (&c)[M][N][4], const u32 (&a)[M][4], u32 tile, int row, int chunk,
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

// Columns 16 · step.. of a result, rounded, as the left side of another product.
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
