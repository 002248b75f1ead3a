// Causal attention over packed segments, forward: o = softmax(scale · q·kᵀ) · v for each head, and lse, the
// natural logarithm of each row's sum of exponentials. With sinks, each head has one more score, which belongs to no key.
//
// A block of 4 warps owns a tile of queries of one head and loops over tiles of keys from the diagonal backwards, with
// a running maximum and sum (online softmax). Each warp has its own 16 or 32 queries, as many as registers allow, so
// that a fragment of keys or values is used by several matrix instructions. The next keys and values are copied while
// the current ones are multiplied, with one barrier per tile. Two warps share the queries of heads over 256 channels. Sums are rescaled to a new maximum only if it makes the
// exponentials more than 2^8 times larger; until then they cannot overflow. At T = 8192 with 28 heads of 128, the work
// is 0.48 TFLOP and the operands are 134 MB, so the kernel is bound by compute.
// Left out: dropout, other masks, and the KV cache.

// Before Ampere a block may use 64 KiB of shared memory, so large heads process fewer keys at a time.
#define FEWER_KEYS (CAPABILITY < 80 && HEAD > 64 && HEAD <= 256 ? 2 : 1)
#if HEAD <= 128
#define WARP_QUERIES 32
#define KEYS (64 / FEWER_KEYS)
#elif HEAD <= 256
#define WARP_QUERIES 16
#define KEYS (32 / FEWER_KEYS)
#else
#define WARP_QUERIES 16
#define KEYS 16
#endif
#define QUERIES (WARP_QUERIES * THREADS / WARP / SHARERS)

// The sinks of all heads; `values` is null if there are none.
struct Sinks {
    const void *values;
    int dtype;
    __device__ __forceinline__ float of(int head) const {
        return values != nullptr ? stored_float(values, dtype, head) : -infinity();
    }
};

// One block lists the tiles of queries.
extern "C" __global__ void __launch_bounds__(THREADS) FOR_HEAD(attention_tiles_)(const i32 *boundaries, int segments,
                                                                                int tokens, int4 *list) {
    list_tiles(boundaries, segments, tokens, QUERIES, 0, list);
}

#if !defined(ACT_F32)

#define ROW_FRAGMENTS (WARP_QUERIES / 16)
#define KEY_FRAGMENTS (KEYS / 8)
#define QUERY_BYTES (QUERIES * ROW_BYTES)
#define KEY_BYTES (KEYS * ROW_BYTES)
// The initial maximum: below any score, and finite, so that differences are not NaN.
#define NOTHING_SEEN -1e30f
// The power of two by which a row's maximum may grow before its sums are rescaled.
#define SLACK 8.0f

// Grid: tiles times heads. Dynamic shared memory: queries, then two stages of keys and values, in all
// QUERY_BYTES + 4 · KEY_BYTES.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    FOR_HEAD(attention_)(const act *q, i64 q_stride, const act *k, i64 k_stride, const act *v, i64 v_stride, act *o,
                         i64 o_stride, float *lse, const int4 *list, int heads, int kv_heads, int head_dim,
                         int window, float scale, float cap, const void *sinks, int sinks_dtype) {
    const int head = blockIdx.x % heads, kv_head = head / (heads / kv_heads);
    Tile tile;
    if (!read_tile(list, blockIdx.x / heads, tile))
        return;
    const int warp = threadIdx.x / WARP / SHARERS, share_of = threadIdx.x / WARP % SHARERS;
    const int first_chunk = share_of * (CHUNKS / SHARERS), lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const u32 queries = shared_base(), ring = queries + QUERY_BYTES;
    const LanePlaces places = lane_places();
    const CopyPlace place = copy_place(head_dim);

    const int seen_from = max(tile.begin, tile.first + 1 - window);
    const int first_key = tile.begin + (seen_from - tile.begin) / KEYS * KEYS;
    const int key_tiles = (tile.last - first_key + KEYS - 1) / KEYS;
    int key = first_key + (key_tiles - 1) * KEYS;
    const act *k_source = copy_source(k, k_stride, key, kv_head * head_dim, place);
    const act *v_source = copy_source(v, v_stride, key, kv_head * head_dim, place);
    auto load_keys = [&](int stage, int rows) {
        const u32 to = ring + stage * 2 * KEY_BYTES;
        load_tile<KEYS>(to, k_source, k_stride, rows, place);
        load_tile<KEYS>(to + KEY_BYTES, v_source, v_stride, rows, place);
        copy_async_commit();
        k_source -= KEYS * k_stride;
        v_source -= KEYS * v_stride;
    };
    load_tile<QUERIES>(queries, copy_source(q, q_stride, tile.first, head * head_dim, place), q_stride,
                       tile.last - tile.first, place);
    load_keys(0, tile.end - key);

    // The factor that turns scores into exponents of two: exp(x) = 2^(x log2(e)).
    const float to_power = cap > 0.0f ? LOG2_E : scale * LOG2_E;
    const float slack = SLACK / to_power;
    const int warp_query = tile.first + warp * WARP_QUERIES;
    float output[ROW_FRAGMENTS][HEAD / 8 / SHARERS][4] = {}; // (queries, own channels)
    // Running maximum and sum of the rows g and g + 8 of each fragment. A lane sums over its own columns only.
    float most[ROW_FRAGMENTS][2], sum[ROW_FRAGMENTS][2];
#pragma unroll
    for (int m = 0; m < ROW_FRAGMENTS; ++m) {
        most[m][0] = most[m][1] = NOTHING_SEEN;
        sum[m][0] = sum[m][1] = 0.0f;
    }

#pragma unroll 1
    for (int step = 0; step < key_tiles; ++step, key -= KEYS) {
        copy_async_wait<0>();
        __syncthreads();
        if (step + 1 < key_tiles)
            load_keys((step + 1) % 2, KEYS);
        // All keys of this tile come after the warp's queries.
        if (key > warp_query + WARP_QUERIES - 1)
            continue;
        const u32 keys = ring + step % 2 * 2 * KEY_BYTES, values = keys + KEY_BYTES;
        float score[ROW_FRAGMENTS][KEY_FRAGMENTS][4]; // (queries, keys)
        tile_matmul(score, queries, warp * WARP_QUERIES, keys, 0, places);
        if (cap > 0.0f) {
            const float inner = scale / cap;
#pragma unroll
            for (int m = 0; m < ROW_FRAGMENTS; ++m)
#pragma unroll
                for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        score[m][n][i] = cap * tanh_approx(score[m][n][i] * inner);
        }
        const bool on_diagonal = key + KEYS - 1 > warp_query;
        const bool at_window = key <= warp_query + WARP_QUERIES - 1 - window;
        if (on_diagonal || at_window) {
#pragma unroll
            for (int m = 0; m < ROW_FRAGMENTS; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    // Columns after `last - window` and up to `last` are visible.
                    const int last = warp_query + m * 16 + i / 2 * 8 + g - key - 2 * t - i % 2;
#pragma unroll
                    for (int n = 0; n < KEY_FRAGMENTS; ++n)
                        if (n * 8 > last || n * 8 <= last - window)
                            score[m][n][i] = -infinity();
                }
        }

        float larger[ROW_FRAGMENTS][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < ROW_FRAGMENTS; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float x = fmaxf(score[m][0][2 * r], score[m][0][2 * r + 1]);
#pragma unroll
                for (int n = 1; n < KEY_FRAGMENTS; ++n)
                    x = fmaxf(x, fmaxf(score[m][n][2 * r], score[m][n][2 * r + 1]));
                x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, 1));
                x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, 2));
                larger[m][r] = x;
                grown |= x > most[m][r] + slack;
            }
        if (__any_sync(EVERY_LANE, grown)) {
#pragma unroll
            for (int m = 0; m < ROW_FRAGMENTS; ++m) {
                float factor[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    // Decided per row, so that the result of a row does not depend on other rows.
                    const float next = larger[m][r] > most[m][r] + slack ? larger[m][r] : most[m][r];
                    factor[r] = power_of_two((most[m][r] - next) * to_power);
                    most[m][r] = next;
                    sum[m][r] *= factor[r];
                }
#pragma unroll
                for (int n = 0; n < HEAD / 8 / SHARERS; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        output[m][n][i] *= factor[i / 2];
            }
        }
#pragma unroll
        for (int m = 0; m < ROW_FRAGMENTS; ++m) {
            const float base[2] = {most[m][0] * to_power, most[m][1] * to_power};
#pragma unroll
            for (int n = 0; n < KEY_FRAGMENTS; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    score[m][n][i] = power_of_two(fmaf(score[m][n][i], to_power, -base[i / 2]));
                    sum[m][i / 2] += score[m][n][i];
                }
        }
#pragma unroll
        for (int part = 0; part < KEYS / 16; ++part) {
            u32 left[ROW_FRAGMENTS][4];
            as_left(left, score, part);
            add_matmul(output, left, values, part * 16, first_chunk, places);
        }
    }

    // The queries are no longer needed, so their shared memory is used to write the result.
    const int rows = min(WARP_QUERIES, tile.last - warp_query);
    if (SHARERS > 1)
        __syncthreads();
    else
        __syncwarp();
    const float sink = Sinks{sinks, sinks_dtype}.of(head) * LOG2_E;
#pragma unroll
    for (int m = 0; m < ROW_FRAGMENTS; ++m) {
        float share[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = sum[m][r];
            total += __shfl_xor_sync(EVERY_LANE, total, 1);
            total += __shfl_xor_sync(EVERY_LANE, total, 2);
            // The sink joins the sum at the larger of both maxima; it is -infinity if there is none.
            const float own = most[m][r] * to_power, top = fmaxf(own, sink), factor = power_of_two(own - top);
            total = total * factor + power_of_two(sink - top);
            share[r] = factor / total;
            const int row = m * 16 + r * 8 + g;
            if (t == 0 && share_of == 0 && row < rows)
                lse[(i64)(warp_query + row) * heads + head] = (top + log2f(total)) * LN_2;
        }
#pragma unroll
        for (int n = 0; n < HEAD / 8 / SHARERS; ++n)
            put_fragment(queries, warp * WARP_QUERIES + m * 16, first_chunk + n, output[m][n], share[0], share[1]);
    }
    __syncwarp();
    if (rows > 0)
        store_rows(o + warp_query * o_stride + (i64)head * head_dim, o_stride, queries, warp * WARP_QUERIES, rows,
                   first_chunk, CHUNKS / SHARERS, head_dim);
}

#endif

// The plain form, without tiles: each warp processes one query at a time.
__device__ __forceinline__ void plain_attention(const act *q, i64 q_stride, const act *k, i64 k_stride, const act *v, i64 v_stride, act *o,
                                                i64 o_stride, float *lse, const int4 *list, int heads, int kv_heads, int head_dim,
                                                int window, float scale, float cap, Sinks sinks) {
    const int head = blockIdx.x % heads, kv_head = head / (heads / kv_heads);
    const i64 column = (i64)head * head_dim, kv_column = (i64)kv_head * head_dim;
    Tile tile;
    if (!read_tile(list, blockIdx.x / heads, tile))
        return;
    for (int query = tile.first + threadIdx.x / WARP; query < tile.last; query += THREADS / WARP) {
        // A sink is a first score without a value.
        float own[OWN], other[OWN], output[OWN] = {};
        float most = sinks.of(head), sum = sinks.values != nullptr ? 1.0f : 0.0f;
        read_row(own, q + query * q_stride + column, head_dim);
        for (int key = max(tile.begin, query + 1 - window); key <= query; ++key) {
            read_row(other, k + key * k_stride + kv_column, head_dim);
            float score = dot(own, other) * scale;
            if (cap > 0.0f)
                score = cap * tanhf(score / cap);
            const float next = fmaxf(most, score), factor = expf(most - next), power = expf(score - next);
            most = next;
            sum = sum * factor + power;
            read_row(other, v + key * v_stride + kv_column, head_dim);
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                output[i] = fmaf(power, other[i], output[i] * factor);
        }
        write_row(o + query * o_stride + column, output, 1.0f / sum, head_dim);
        if (threadIdx.x % WARP == 0)
            lse[(i64)query * heads + head] = most + logf(sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    FOR_HEAD(attention_plain_)(const act *q, i64 q_stride, const act *k, i64 k_stride, const act *v, i64 v_stride, act *o,
                               i64 o_stride, float *lse, const int4 *list, int heads, int kv_heads, int head_dim,
                               int window, float scale, float cap, const void *sinks, int sinks_dtype) {
    plain_attention(q, q_stride, k, k_stride, v, v_stride, o, o_stride, lse, list, heads, kv_heads, head_dim, window,
                    scale, cap, Sinks{sinks, sinks_dtype});
}

#if defined(ACT_F32)
extern "C" __global__ void __launch_bounds__(THREADS)
    FOR_HEAD(attention_)(const act *q, i64 q_stride, const act *k, i64 k_stride, const act *v, i64 v_stride, act *o,
                         i64 o_stride, float *lse, const int4 *list, int heads, int kv_heads, int head_dim,
                         int window, float scale, float cap, const void *sinks, int sinks_dtype) {
    plain_attention(q, q_stride, k, k_stride, v, v_stride, o, o_stride, lse, list, heads, kv_heads, head_dim, window,
                    scale, cap, Sinks{sinks, sinks_dtype});
}
#endif
