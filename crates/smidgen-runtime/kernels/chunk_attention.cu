// Attention to all rows of a chunk, with a learned bias per head and distance: forward and backward.
//
// Forward, per head:  s = scale · q·kᵀ + bias[key - query]     p = softmax(s) = exp(s - lse)     o = p·v
// Backward:           dv = pᵀ·do     dp = do·vᵀ     ds = p ∘ (dp - delta)     dq = scale · ds·k     dk = scale · dsᵀ·q
// where delta = Σ do ∘ o over the channels of a head; `attention_grad.cu` has the derivation.
// A block has a tile of rows of one head, which may belong to several chunks, and loops over the rows of all these
// chunks. Pairs of rows from different chunks are masked. Chunks are short (500 rows), so tiles need no list. Backward
// computes the scores twice, once for dq and once for dk and dv, and uses no atomics: sums have a fixed order.
// Tiles need 16-bit rows aligned to 16 bytes and heads of at most 64 channels, in multiples of 8. For other shapes each
// kernel has a plain form in which a warp processes one row after the other.
// Left out: the gradient of the bias, which is never trained. HEAD is defined before this text.

#define MARK_COLUMNS 4
// Rows of a tile, of queries and of keys.
#define TILE 64

// Scale and bias of the scores, and the chunks.
struct ChunkScores {
    const i32 *marks;
    int rows;
    const void *bias;
    int dtype;
    // Larger distances use the bias of this one.
    int most;
    int heads, head_dim;
    float scale;

    __device__ __forceinline__ float bias_at(int distance, int head) const {
        const int index = min(max(distance, -most), most - 1) + most;
        return stored_float(bias, dtype, (i64)index * heads + head);
    }

    // Begin and end of the chunk of a row; empty if the row does not exist.
    __device__ __forceinline__ int2 chunk_of(int row) const {
        if (row >= rows)
            return make_int2(0, 0);
        const int2 chunk = make_int2(marks[MARK_COLUMNS * row + 1], marks[MARK_COLUMNS * row + 2]);
        if (chunk.x < 0 || chunk.x > row || chunk.y <= row || chunk.y > rows)
            __trap();
        return chunk;
    }
};

#define SCORE_PARAMETERS                                                                                              \
    const i32 *marks, int rows, const void *bias, int dtype, int most, int heads, int head_dim, float scale
#define SCORES ChunkScores{marks, rows, bias, dtype, most, heads, head_dim, scale}

struct ChunkOperands {
    const act *q, *k, *v;
    i64 q_stride, k_stride, v_stride;
};

#define OPERAND_PARAMETERS const act *q, i64 q_stride, const act *k, i64 k_stride, const act *v, i64 v_stride
#define OPERANDS ChunkOperands{q, k, v, q_stride, k_stride, v_stride}

struct Upstream {
    const act *dout;
    i64 dout_stride;
    // Both (A, H).
    const float *lse, *deltas;
};

#define UPSTREAM_PARAMETERS const act *dout, i64 dout_stride, const float *lse, const float *deltas
#define UPSTREAM Upstream{dout, dout_stride, lse, deltas}

// ── plain forms ──────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void attend_plainly(const ChunkOperands &x, const ChunkScores &scores, act *o, i64 o_stride,
                                               float *lse) {
    const int head = blockIdx.x % scores.heads, first = blockIdx.x / scores.heads * TILE;
    const i64 column = (i64)head * scores.head_dim;
    for (int query = first + threadIdx.x / WARP; query < min(first + TILE, scores.rows); query += THREADS / WARP) {
        const int2 chunk = scores.chunk_of(query);
        float own[OWN], other[OWN], output[OWN] = {}, largest = -infinity(), sum = 0.0f;
        read_row(own, x.q + query * x.q_stride + column, scores.head_dim);
        for (int key = chunk.x; key < chunk.y; ++key) {
            read_row(other, x.k + key * x.k_stride + column, scores.head_dim);
            const float score = dot(own, other) * scores.scale + scores.bias_at(key - query, head);
            const float next = fmaxf(largest, score), factor = expf(largest - next), power = expf(score - next);
            largest = next;
            sum = sum * factor + power;
            read_row(other, x.v + key * x.v_stride + column, scores.head_dim);
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                output[i] = fmaf(power, other[i], output[i] * factor);
        }
        write_row(o + query * o_stride + column, output, 1.0f / sum, scores.head_dim);
        if (threadIdx.x % WARP == 0)
            lse[(i64)query * scores.heads + head] = largest + logf(sum);
    }
}

__device__ __forceinline__ void query_slopes_plainly(const ChunkOperands &x, const ChunkScores &scores,
                                                     const Upstream &up, act *dq, i64 dq_stride) {
    const int head = blockIdx.x % scores.heads, first = blockIdx.x / scores.heads * TILE;
    const i64 column = (i64)head * scores.head_dim;
    for (int query = first + threadIdx.x / WARP; query < min(first + TILE, scores.rows); query += THREADS / WARP) {
        const int2 chunk = scores.chunk_of(query);
        const i64 at = (i64)query * scores.heads + head;
        float own[OWN], slope[OWN], other[OWN], sum[OWN] = {};
        read_row(own, x.q + query * x.q_stride + column, scores.head_dim);
        read_row(slope, up.dout + query * up.dout_stride + column, scores.head_dim);
        for (int key = chunk.x; key < chunk.y; ++key) {
            read_row(other, x.v + key * x.v_stride + column, scores.head_dim);
            const float dp = dot(slope, other);
            read_row(other, x.k + key * x.k_stride + column, scores.head_dim);
            const float score = dot(own, other) * scores.scale + scores.bias_at(key - query, head);
            const float ds = expf(score - up.lse[at]) * (dp - up.deltas[at]);
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                sum[i] = fmaf(ds, other[i], sum[i]);
        }
        write_row(dq + query * dq_stride + column, sum, scores.scale, scores.head_dim);
    }
}

__device__ __forceinline__ void key_slopes_plainly(const ChunkOperands &x, const ChunkScores &scores,
                                                   const Upstream &up, act *dk, i64 dk_stride, act *dv,
                                                   i64 dv_stride) {
    const int head = blockIdx.x % scores.heads, first = blockIdx.x / scores.heads * TILE;
    const i64 column = (i64)head * scores.head_dim;
    for (int key = first + threadIdx.x / WARP; key < min(first + TILE, scores.rows); key += THREADS / WARP) {
        const int2 chunk = scores.chunk_of(key);
        float own[OWN], value[OWN], other[OWN], slope[OWN], key_sum[OWN] = {}, value_sum[OWN] = {};
        read_row(own, x.k + key * x.k_stride + column, scores.head_dim);
        read_row(value, x.v + key * x.v_stride + column, scores.head_dim);
        for (int query = chunk.x; query < chunk.y; ++query) {
            const i64 at = (i64)query * scores.heads + head;
            read_row(other, x.q + query * x.q_stride + column, scores.head_dim);
            read_row(slope, up.dout + query * up.dout_stride + column, scores.head_dim);
            const float score = dot(own, other) * scores.scale + scores.bias_at(key - query, head);
            const float p = expf(score - up.lse[at]), ds = p * (dot(slope, value) - up.deltas[at]);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                key_sum[i] = fmaf(ds, other[i], key_sum[i]);
                value_sum[i] = fmaf(p, slope[i], value_sum[i]);
            }
        }
        write_row(dk + key * dk_stride + column, key_sum, scores.scale, scores.head_dim);
        write_row(dv + key * dv_stride + column, value_sum, 1.0f, scores.head_dim);
    }
}

// Grid of these and of the forms on tiles: ceil(rows / TILE) times heads.
extern "C" __global__ void __launch_bounds__(THREADS)
    FOR_HEAD(chunk_attention_plain_)(OPERAND_PARAMETERS, act *o, i64 o_stride, float *lse, SCORE_PARAMETERS) {
    attend_plainly(OPERANDS, SCORES, o, o_stride, lse);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    FOR_HEAD(chunk_attention_dq_plain_)(OPERAND_PARAMETERS, UPSTREAM_PARAMETERS, act *dq, i64 dq_stride,
                                        SCORE_PARAMETERS) {
    query_slopes_plainly(OPERANDS, SCORES, UPSTREAM, dq, dq_stride);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    FOR_HEAD(chunk_attention_dkv_plain_)(OPERAND_PARAMETERS, UPSTREAM_PARAMETERS, act *dk, i64 dk_stride, act *dv,
                                         i64 dv_stride, SCORE_PARAMETERS) {
    key_slopes_plainly(OPERANDS, SCORES, UPSTREAM, dk, dk_stride, dv, dv_stride);
}

// delta of each row and head (A, H). A warp computes one. Grid: ceil(items / warps of a block).
extern "C" __global__ void __launch_bounds__(THREADS)
    FOR_HEAD(chunk_attention_deltas_)(const act *o, i64 o_stride, const act *dout, i64 dout_stride, int items,
                                      int heads, int head_dim, float *deltas) {
    const int item = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (item >= items)
        return;
    const i64 row = item / heads, column = (i64)(item % heads) * head_dim;
    float a[OWN], b[OWN];
    read_row(a, o + row * o_stride + column, head_dim);
    read_row(b, dout + row * dout_stride + column, head_dim);
    const float sum = dot(a, b);
    if (threadIdx.x % WARP == 0)
        deltas[item] = sum;
}

// ── tiles ────────────────────────────────────────────────────────────────────────────────────────

#if HEAD <= 64
#if !defined(ACT_F32)

#define TILE_BYTES (TILE * ROW_BYTES)
#define FRAGMENTS (TILE / 8)
#define CHANNELS (HEAD / 8)
// The initial maximum: below any score, and finite, so that differences are not NaN.
#define NOTHING_SEEN -1e30f

// Shared memory, in this order: the block's own tile or two tiles, two stages of two tiles each, two stages of biases
// by distance, two stages of lse and delta.
#define STAGES_AT(own_tiles) ((own_tiles) * TILE_BYTES)
#define BIASES_AT(own_tiles) (STAGES_AT(own_tiles) + 4 * TILE_BYTES)
#define BIASES_BYTES (2 * TILE * 4)
#define STATISTICS_AT(own_tiles) (BIASES_AT(own_tiles) + 2 * BIASES_BYTES)
#define STATISTICS_BYTES (2 * TILE * 4)

__device__ __forceinline__ float shared_load_float(u32 from) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
    return x;
}

__device__ __forceinline__ void shared_store_float(u32 to, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

// A tile of rows of one head, and the begin and end of the rows of all its chunks.
struct ChunkTile {
    int head, first, rows, begin, end, steps;
};

__device__ __forceinline__ ChunkTile chunk_tile(const ChunkScores &scores) {
    ChunkTile tile;
    tile.head = blockIdx.x % scores.heads;
    tile.first = blockIdx.x / scores.heads * TILE;
    tile.rows = min(TILE, scores.rows - tile.first);
    tile.begin = scores.chunk_of(tile.first).x;
    tile.end = scores.chunk_of(tile.first + tile.rows - 1).y;
    tile.steps = (tile.end - tile.begin + TILE - 1) / TILE;
    return tile;
}

// Writes the biases of all distances between two tiles, times log2(e): element i is for distance `nearest` + i - TILE +
// 1.
__device__ __forceinline__ void store_biases(u32 to, const ChunkScores &scores, int nearest, int head) {
    const int i = threadIdx.x;
    if (i < 2 * TILE)
        shared_store_float(to + 4 * i, scores.bias_at(nearest + i - TILE + 1, head) * LOG2_E);
}

// The chunks of this lane's two rows of a fragment.
struct LaneChunks {
    int2 of[2];
};

__device__ __forceinline__ LaneChunks lane_chunks(const ChunkScores &scores, int first_row) {
    const int row = first_row + threadIdx.x % WARP / 4;
    return LaneChunks{{scores.chunk_of(row), scores.chunk_of(row + 8)}};
}

__device__ __forceinline__ void attend(const ChunkOperands &x, const ChunkScores &scores, act *o, i64 o_stride,
                                       float *lse) {
    const ChunkTile tile = chunk_tile(scores);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const u32 queries = shared_base(), ring = queries + STAGES_AT(1), biases = queries + BIASES_AT(1);
    const LanePlaces places = lane_places();
    const CopyPlace place = copy_place(scores.head_dim);
    const int column = tile.head * scores.head_dim, warp_row = warp * 16;
    const LaneChunks chunks = lane_chunks(scores, tile.first + warp_row);
    auto load_keys = [&](int step) {
        const int key = tile.begin + step * TILE;
        const u32 to = ring + step % 2 * 2 * TILE_BYTES;
        load_tile<TILE>(to, copy_source(x.k, x.k_stride, key, column, place), x.k_stride, tile.end - key, place);
        load_tile<TILE>(to + TILE_BYTES, copy_source(x.v, x.v_stride, key, column, place), x.v_stride,
                        tile.end - key, place);
        copy_async_commit();
        store_biases(biases + step % 2 * BIASES_BYTES, scores, key - tile.first, tile.head);
    };
    load_tile<TILE>(queries, copy_source(x.q, x.q_stride, tile.first, column, place), x.q_stride, tile.rows, place);
    load_keys(0);

    const float to_power = scores.scale * LOG2_E;
    float output[1][CHANNELS][4] = {}; // (queries, channels)
    float largest[2] = {NOTHING_SEEN, NOTHING_SEEN}, sum[2] = {};
#pragma unroll 1
    for (int step = 0; step < tile.steps; ++step) {
        copy_async_wait<0>();
        __syncthreads();
        if (step + 1 < tile.steps)
            load_keys(step + 1);
        const u32 keys = ring + step % 2 * 2 * TILE_BYTES, values = keys + TILE_BYTES;
        const u32 own_biases = biases + step % 2 * BIASES_BYTES;
        const int key = tile.begin + step * TILE;
        float score[1][FRAGMENTS][4]; // (queries, keys)
        tile_matmul(score, queries, warp_row, keys, 0, places);
        float larger[2] = {largest[0], largest[1]};
#pragma unroll
        for (int n = 0; n < FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = n * 8 + 2 * t + i % 2, row = warp_row + i / 2 * 8 + g;
                const int2 chunk = chunks.of[i / 2];
                const float bias = shared_load_float(own_biases + 4 * (at - row + TILE - 1));
                const bool visible = key + at >= chunk.x && key + at < chunk.y;
                score[0][n][i] = visible ? fmaf(score[0][n][i], to_power, bias) : -infinity();
                larger[i / 2] = fmaxf(larger[i / 2], score[0][n][i]);
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            larger[r] = fmaxf(larger[r], __shfl_xor_sync(EVERY_LANE, larger[r], 1));
            larger[r] = fmaxf(larger[r], __shfl_xor_sync(EVERY_LANE, larger[r], 2));
            const float factor = power_of_two(largest[r] - larger[r]);
            largest[r] = larger[r];
            sum[r] *= factor;
#pragma unroll
            for (int n = 0; n < CHANNELS; ++n) {
                output[0][n][2 * r] *= factor;
                output[0][n][2 * r + 1] *= factor;
            }
        }
#pragma unroll
        for (int n = 0; n < FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                score[0][n][i] = power_of_two(score[0][n][i] - largest[i / 2]);
                sum[i / 2] += score[0][n][i];
            }
#pragma unroll
        for (int part = 0; part < TILE / 16; ++part) {
            u32 left[1][4];
            as_left(left, score, part);
            add_matmul(output, left, values, part * 16, 0, places);
        }
    }

    // The warp's queries are no longer needed, so their shared memory is used to write the result.
    const int rows = min(16, tile.rows - warp_row);
    float share[2];
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(EVERY_LANE, sum[r], 1);
        sum[r] += __shfl_xor_sync(EVERY_LANE, sum[r], 2);
        share[r] = 1.0f / sum[r];
        const int row = r * 8 + g;
        if (t == 0 && row < rows)
            lse[(i64)(tile.first + warp_row + row) * scores.heads + tile.head] =
                (largest[r] + log2f(sum[r])) * LN_2;
    }
#pragma unroll
    for (int n = 0; n < CHANNELS; ++n)
        put_fragment(queries, warp_row, n, output[0][n], share[0], share[1]);
    __syncwarp();
    if (rows > 0)
        store_rows(o + (tile.first + warp_row) * o_stride + column, o_stride, queries, warp_row, rows, 0, CHUNKS,
                   scores.head_dim);
}

// dq of a tile of queries.
__device__ __forceinline__ void query_slopes(const ChunkOperands &x, const ChunkScores &scores, const Upstream &up,
                                             act *dq, i64 dq_stride) {
    const ChunkTile tile = chunk_tile(scores);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const u32 queries = shared_base(), outputs = queries + TILE_BYTES;
    const u32 ring = queries + STAGES_AT(2), biases = queries + BIASES_AT(2);
    const LanePlaces places = lane_places();
    const CopyPlace place = copy_place(scores.head_dim);
    const int column = tile.head * scores.head_dim, warp_row = warp * 16;
    const LaneChunks chunks = lane_chunks(scores, tile.first + warp_row);
    auto load_keys = [&](int step) {
        const int key = tile.begin + step * TILE;
        const u32 to = ring + step % 2 * 2 * TILE_BYTES;
        load_tile<TILE>(to, copy_source(x.k, x.k_stride, key, column, place), x.k_stride, tile.end - key, place);
        load_tile<TILE>(to + TILE_BYTES, copy_source(x.v, x.v_stride, key, column, place), x.v_stride,
                        tile.end - key, place);
        copy_async_commit();
        store_biases(biases + step % 2 * BIASES_BYTES, scores, key - tile.first, tile.head);
    };
    load_tile<TILE>(queries, copy_source(x.q, x.q_stride, tile.first, column, place), x.q_stride, tile.rows, place);
    load_tile<TILE>(outputs, copy_source(up.dout, up.dout_stride, tile.first, column, place), up.dout_stride,
                    tile.rows, place);
    load_keys(0);

    const float to_power = scores.scale * LOG2_E;
    float power[2] = {}, delta[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = warp_row + r * 8 + g;
        if (row < tile.rows) {
            const i64 at = (i64)(tile.first + row) * scores.heads + tile.head;
            power[r] = up.lse[at] * LOG2_E;
            delta[r] = up.deltas[at];
        }
    }
    float sum[1][CHANNELS][4] = {}; // (queries, channels)
#pragma unroll 1
    for (int step = 0; step < tile.steps; ++step) {
        copy_async_wait<0>();
        __syncthreads();
        if (step + 1 < tile.steps)
            load_keys(step + 1);
        const u32 keys = ring + step % 2 * 2 * TILE_BYTES, values = keys + TILE_BYTES;
        const u32 own_biases = biases + step % 2 * BIASES_BYTES;
        const int key = tile.begin + step * TILE;
        float score[1][FRAGMENTS][4], slope[1][FRAGMENTS][4]; // (queries, keys)
        tile_matmul(score, queries, warp_row, keys, 0, places);
        tile_matmul(slope, outputs, warp_row, values, 0, places);
#pragma unroll
        for (int n = 0; n < FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = n * 8 + 2 * t + i % 2, row = warp_row + i / 2 * 8 + g;
                const int2 chunk = chunks.of[i / 2];
                const float bias = shared_load_float(own_biases + 4 * (at - row + TILE - 1));
                const bool visible = key + at >= chunk.x && key + at < chunk.y;
                const float p = power_of_two(fmaf(score[0][n][i], to_power, bias - power[i / 2]));
                slope[0][n][i] = visible ? p * (slope[0][n][i] - delta[i / 2]) : 0.0f;
            }
#pragma unroll
        for (int part = 0; part < TILE / 16; ++part) {
            u32 left[1][4];
            as_left(left, slope, part);
            add_matmul(sum, left, keys, part * 16, 0, places);
        }
    }
    const int rows = min(16, tile.rows - warp_row);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < CHANNELS; ++n)
        put_fragment(queries, warp_row, n, sum[0][n], scores.scale, scores.scale);
    __syncwarp();
    if (rows > 0)
        store_rows(dq + (tile.first + warp_row) * dq_stride + column, dq_stride, queries, warp_row, rows, 0, CHUNKS,
                   scores.head_dim);
}

// dk and dv of a tile of keys. A query sees a key if it is in the key's chunk.
__device__ __forceinline__ void key_slopes(const ChunkOperands &x, const ChunkScores &scores, const Upstream &up,
                                           act *dk, i64 dk_stride, act *dv, i64 dv_stride) {
    const ChunkTile tile = chunk_tile(scores);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const u32 keys = shared_base(), values = keys + TILE_BYTES;
    const u32 ring = keys + STAGES_AT(2), biases = keys + BIASES_AT(2), statistics = keys + STATISTICS_AT(2);
    const LanePlaces places = lane_places();
    const CopyPlace place = copy_place(scores.head_dim);
    const int column = tile.head * scores.head_dim, warp_row = warp * 16;
    const LaneChunks chunks = lane_chunks(scores, tile.first + warp_row);
    auto load_queries = [&](int step) {
        const int query = tile.begin + step * TILE;
        const u32 to = ring + step % 2 * 2 * TILE_BYTES;
        load_tile<TILE>(to, copy_source(x.q, x.q_stride, query, column, place), x.q_stride, tile.end - query, place);
        load_tile<TILE>(to + TILE_BYTES, copy_source(up.dout, up.dout_stride, query, column, place), up.dout_stride,
                        tile.end - query, place);
        copy_async_commit();
        store_biases(biases + step % 2 * BIASES_BYTES, scores, tile.first - query, tile.head);
        // The first half of the threads copies lse, the second half delta.
        const int row = threadIdx.x % TILE;
        if (threadIdx.x < 2 * TILE) {
            const bool is_delta = threadIdx.x >= TILE;
            const i64 at = (i64)(query + row) * scores.heads + tile.head;
            float number = 0.0f;
            if (query + row < tile.end)
                number = is_delta ? up.deltas[at] : up.lse[at] * LOG2_E;
            shared_store_float(statistics + step % 2 * STATISTICS_BYTES + 4 * threadIdx.x, number);
        }
    };
    load_tile<TILE>(keys, copy_source(x.k, x.k_stride, tile.first, column, place), x.k_stride, tile.rows, place);
    load_tile<TILE>(values, copy_source(x.v, x.v_stride, tile.first, column, place), x.v_stride, tile.rows, place);
    load_queries(0);

    const float to_power = scores.scale * LOG2_E;
    float key_sum[1][CHANNELS][4] = {}, value_sum[1][CHANNELS][4] = {}; // (keys, channels)
#pragma unroll 1
    for (int step = 0; step < tile.steps; ++step) {
        copy_async_wait<0>();
        __syncthreads();
        if (step + 1 < tile.steps)
            load_queries(step + 1);
        const u32 queries = ring + step % 2 * 2 * TILE_BYTES, outputs = queries + TILE_BYTES;
        const u32 own_biases = biases + step % 2 * BIASES_BYTES;
        const u32 own_statistics = statistics + step % 2 * STATISTICS_BYTES;
        const int query = tile.begin + step * TILE;
        float score[1][FRAGMENTS][4], slope[1][FRAGMENTS][4]; // (keys, queries)
        tile_matmul(score, keys, warp_row, queries, 0, places);
        tile_matmul(slope, values, warp_row, outputs, 0, places);
#pragma unroll
        for (int n = 0; n < FRAGMENTS; ++n) {
            const float2 power = shared_load_floats(own_statistics + 4 * (n * 8 + 2 * t));
            const float2 delta = shared_load_floats(own_statistics + 4 * (TILE + n * 8 + 2 * t));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = n * 8 + 2 * t + i % 2, row = warp_row + i / 2 * 8 + g;
                const int2 chunk = chunks.of[i / 2];
                const float bias = shared_load_float(own_biases + 4 * (row - at + TILE - 1));
                const bool visible = query + at >= chunk.x && query + at < chunk.y;
                const float exponent = fmaf(score[0][n][i], to_power, bias - (i % 2 ? power.y : power.x));
                const float p = visible ? power_of_two(exponent) : 0.0f;
                score[0][n][i] = p;
                slope[0][n][i] = visible ? p * (slope[0][n][i] - (i % 2 ? delta.y : delta.x)) : 0.0f;
            }
        }
#pragma unroll
        for (int part = 0; part < TILE / 16; ++part) {
            u32 left[1][4];
            as_left(left, score, part);
            add_matmul(value_sum, left, outputs, part * 16, 0, places);
            as_left(left, slope, part);
            add_matmul(key_sum, left, queries, part * 16, 0, places);
        }
    }
    const int rows = min(16, tile.rows - warp_row);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < CHANNELS; ++n) {
        put_fragment(keys, warp_row, n, key_sum[0][n], scores.scale, scores.scale);
        put_fragment(values, warp_row, n, value_sum[0][n], 1.0f, 1.0f);
    }
    __syncwarp();
    if (rows > 0) {
        const i64 row = tile.first + warp_row;
        store_rows(dk + row * dk_stride + column, dk_stride, keys, warp_row, rows, 0, CHUNKS, scores.head_dim);
        store_rows(dv + row * dv_stride + column, dv_stride, values, warp_row, rows, 0, CHUNKS, scores.head_dim);
    }
}

#else
// f32 has no kernels on tiles.
#define attend attend_plainly
#define query_slopes query_slopes_plainly
#define key_slopes key_slopes_plainly
#endif

// Dynamic shared memory: with one own tile, and without the statistics.
extern "C" __global__ void __launch_bounds__(THREADS)
    FOR_HEAD(chunk_attention_)(OPERAND_PARAMETERS, act *o, i64 o_stride, float *lse, SCORE_PARAMETERS) {
    attend(OPERANDS, SCORES, o, o_stride, lse);
}

// Dynamic shared memory: with two own tiles, and without the statistics.
extern "C" __global__ void __launch_bounds__(THREADS)
    FOR_HEAD(chunk_attention_dq_)(OPERAND_PARAMETERS, UPSTREAM_PARAMETERS, act *dq, i64 dq_stride,
                                  SCORE_PARAMETERS) {
    query_slopes(OPERANDS, SCORES, UPSTREAM, dq, dq_stride);
}

// Dynamic shared memory: with two own tiles and the statistics.
extern "C" __global__ void __launch_bounds__(THREADS)
    FOR_HEAD(chunk_attention_dkv_)(OPERAND_PARAMETERS, UPSTREAM_PARAMETERS, act *dk, i64 dk_stride, act *dv,
                                   i64 dv_stride, SCORE_PARAMETERS) {
    key_slopes(OPERANDS, SCORES, UPSTREAM, dk, dk_stride, dv, dv_stride);
}
#endif
