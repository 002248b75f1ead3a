// Causal attention over packed segments, backward: computes dq, dk and dv from do. Sums have a fixed order.
//
// Forward, per head:  s = scale · q·kᵀ     p = softmax(s) = exp(s - lse)     o = p·v
// lse is stored by the forward pass, so p is recomputed without another pass over the keys.
//     o = p·v           gives   dv = pᵀ·do   and   dp = do·vᵀ
//     p = softmax(s)    gives   ds = p ∘ (dp - Σ p ∘ dp), with the sum over the keys of a query
//     s = scale · q·kᵀ  gives   dq = scale · ds·k   and   dk = scale · dsᵀ·q
// The sum is known in advance: Σ_j p_j dp_j = Σ_j p_j (do · v_j) = do · o, a sum of do ∘ o over the channels of a head.
// It is called delta, so ds = p ∘ (dp - delta).
// A sink of the forward pass is a part of lse and has no value, so nothing here changes with it.
// With a softcap c, the scores are c·t with t = tanh(s / c). d(c·t)/ds = 1 - t², so ds is multiplied by 1 - t².
//
// Some blocks own a tile of keys and loop over all queries that see it, for all query heads that share the key head or
// for a part of these heads. dk and dv stay in registers, and if heads are split into parts, a last kernel adds the
// parts. Other blocks own a tile of queries and loop over keys for dq. Scores and dp are computed twice (7 matmuls
// instead of 5), but no atomics are needed: the workspace is two floats per query and head, and the parts. Both kinds
// of blocks are in one grid, those with the most work first, so that short blocks fill the gaps at the end. In heads of
// over 256 channels, twice as many warps share queries or keys, and each has half as many channels of the results.
// Left out: splitting one tile of keys over several ranges of queries.

// The number of tiles that a listed tile is cut into. Before Ampere a block may use 64 KiB of shared memory, and only
// half of a tile of large heads fits. Tiles of heads of more than 128 channels do not fit at all there, so these heads
// use the plain kernel.
#if CAPABILITY < 80 && HEAD > 64 && HEAD <= 128
#define TILE_CUT 2
#else
#define TILE_CUT 1
#endif
#if HEAD <= 128
#define WARP_QUERIES (32 / TILE_CUT)
#define WARP_KEYS (32 / TILE_CUT)
#define QUERY_STEP (64 / TILE_CUT)
#define KEY_STEP (HEAD <= 64 ? 64 : 32)
#else
#define WARP_QUERIES 16
#define WARP_KEYS 16
#define QUERY_STEP 32
#define KEY_STEP 16
#endif
// Queries per block for dq; keys per block for dk and dv.
#define QUERIES (WARP_QUERIES * THREADS / WARP / SHARERS)
#define KEYS (2 * WARP_KEYS / SHARERS)

// Lanes that share one sum of `attention_grad_prepare`, and sums per block.
#define SUM_LANES (HEAD <= 64 ? 8 : HEAD <= 128 ? 16 : 32)
#define SUM_ROUNDS 4
#define BLOCK_SUMS (SUM_ROUNDS * THREADS / SUM_LANES)

// Block 0 lists the tiles of queries, and block 1 the tiles of `key_rows` keys. The other blocks compute delta and
// lse · log2(e) (`powers`) for each head and query (H, T). They read o and do once. Grid: 2 + T · H / BLOCK_SUMS.
extern "C" __global__ void __launch_bounds__(THREADS)
    FOR_HEAD(attention_grad_prepare_)(const act *o, i64 o_stride, const act *dout, i64 dout_stride, const float *lse,
                                      const i32 *boundaries, int segments, int tokens, int heads, int head_dim,
                                      int aligned, int key_rows, int4 *query_list, int4 *key_list, float *powers, float *deltas) {
    if (blockIdx.x < 2) {
        const bool of_keys = blockIdx.x == 1;
        list_tiles(boundaries, segments, tokens, of_keys ? key_rows : TILE_CUT * QUERIES, of_keys,
                   of_keys ? key_list : query_list);
        return;
    }
    const int first_chunk = threadIdx.x % SUM_LANES * 8;
    const int first = (blockIdx.x - 2) * BLOCK_SUMS + threadIdx.x / SUM_LANES;
    float sums[SUM_ROUNDS];
#pragma unroll
    for (int round = 0; round < SUM_ROUNDS; ++round) {
        const int item = first + round * (THREADS / SUM_LANES);
        const int token = item / heads, head = item % heads;
        sums[round] = 0.0f;
#pragma unroll
        for (int chunk = first_chunk; chunk < HEAD; chunk += 8 * SUM_LANES) {
            const act *a = o + token * o_stride + (i64)head * head_dim + chunk;
            const act *b = dout + token * dout_stride + (i64)head * head_dim + chunk;
            float x[8] = {}, y[8] = {};
            if (token < tokens) {
                if (aligned) {
                    if (chunk < head_dim) {
                        load_eight<act>(a, x);
                        load_eight<act>(b, y);
                    }
                } else {
                    for (int i = 0; i < 8; ++i)
                        if (chunk + i < head_dim) {
                            x[i] = to_float(a[i]);
                            y[i] = to_float(b[i]);
                        }
                }
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
                sums[round] = fmaf(x[i], y[i], sums[round]);
        }
    }
#pragma unroll
    for (int round = 0; round < SUM_ROUNDS; ++round) {
        const float sum = lanes_sum(sums[round], SUM_LANES);
        const int item = first + round * (THREADS / SUM_LANES);
        const int token = item / heads, head = item % heads;
        if (first_chunk == 0 && token < tokens) {
            const i64 at = (i64)head * tokens + token;
            deltas[at] = sum;
            powers[at] = lse[item] * LOG2_E;
        }
    }
}

struct GradOperands {
    const act *q, *k, *v, *dout;
    // `dk` and `dv` point to part 0. Each further part begins `part_elements` after the previous one.
    act *dq, *dk, *dv;
    i64 q_stride, k_stride, v_stride, dout_stride, dq_stride, dk_stride, dv_stride;
    // (H, T)
    const float *powers, *deltas;
    int tokens, heads, kv_heads;
    // The number of parts that the query heads of a key head are split into, at most one per head.
    int parts;
    i64 part_elements;

    // First query head of a part, counted from the first one of its key head.
    __device__ __forceinline__ int part_head(int part) const { return part * (heads / kv_heads) / parts; }
};

#if !defined(ACT_F32)

#define KEY_ROWS (WARP_KEYS / 16)
#define HALF_QUERIES (QUERY_STEP / 2)
#define HALF_STEPS (HALF_QUERIES / 16)
// Chunks of dk and dv that a warp accumulates: half of the channels, or a quarter.
#define OWN_CHUNKS (CHUNKS / 2 / SHARERS)
#define FRAGMENT_BYTES 512

// Shared memory of a block for dk and dv.
#define KEYS_AT 0
#define VALUES_AT (KEYS_AT + KEYS * ROW_BYTES)
#define QUERIES_AT (VALUES_AT + KEYS * ROW_BYTES)
#define OUTPUTS_AT (QUERIES_AT + 2 * QUERY_STEP * ROW_BYTES)
#define EXCHANGE_AT (OUTPUTS_AT + QUERY_STEP * ROW_BYTES)
#define EXCHANGE_BYTES (KEY_ROWS * HALF_STEPS * FRAGMENT_BYTES)
#define STATISTICS_AT (EXCHANGE_AT + 8 * EXCHANGE_BYTES)
#define STATISTICS_BYTES (QUERY_STEP * 4)

// Replaces the scores by p, and `gradient` (dp) by ds. `power`, `delta` and `distance` (query minus key) are functions
// of the place of an element. With a softcap, (dp - delta) (1 - t²) + delta takes the place of dp, so that the last
// step is the same with and without it.
template <int M, int N, typename Power, typename Delta, typename Distance>
__device__ __forceinline__ void differentiate(float (&score)[M][N][4], float (&gradient)[M][N][4], bool whole,
                                              const Scores &scores, Power power, Delta delta, Distance distance) {
    if (scores.cap > 0.0f) {
        const float inner = scores.scale / scores.cap;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float t = tanh_approx(score[m][n][i] * inner), shift = delta(m, n, i);
                    score[m][n][i] = t * scores.cap;
                    gradient[m][n][i] = fmaf(gradient[m][n][i] - shift, 1.0f - t * t, shift);
                }
    }
    if (!whole) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if ((u32)distance(m, n, i) >= (u32)scores.window)
                        score[m][n][i] = -infinity();
    }
    const float to_power = scores.cap > 0.0f ? LOG2_E : scores.scale * LOG2_E;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float p = power_of_two(fmaf(score[m][n][i], to_power, -power(m, n, i)));
                score[m][n][i] = p;
                gradient[m][n][i] = p * (gradient[m][n][i] - delta(m, n, i));
            }
}

// dk and dv of one tile of keys for a part of the query heads of one key head. Warps 2i and 2i + 1 have the same
// WARP_KEYS keys. Each computes p and ds of half of the queries, passes them to the other warp, and accumulates half of
// the channels of dk and dv. If keys are shared, both pairs have the same keys, and each warp has a quarter of the channels.
__device__ __forceinline__ void gradients_of_keys(const GradOperands &x, const Scores &scores, Tile tile, int kv_head,
                                                  int part) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int pair = warp / 2, half = warp % 2, group = x.heads / x.kv_heads;
    const int first_row = SHARERS > 1 ? 0 : pair * WARP_KEYS;
    const int first_chunk = (SHARERS > 1 ? warp : half) * OWN_CHUNKS;
    const u32 base = shared_base();
    const u32 keys = base + KEYS_AT, values = base + VALUES_AT, outputs = base + OUTPUTS_AT;
    const LanePlaces places = lane_places();
    const CopyPlace place = copy_place(scores.head_dim);
    const int kv_column = kv_head * scores.head_dim;
    const int query_end = min(tile.end, tile.last - 1 + scores.window);
    const int query_tiles = (query_end - tile.first + QUERY_STEP - 1) / QUERY_STEP;
    const int steps = query_tiles * (x.part_head(part + 1) - x.part_head(part));

    auto load_queries = [&](int head, int query, int stage) {
        load_tile<QUERY_STEP>(base + QUERIES_AT + stage * QUERY_STEP * ROW_BYTES,
                              copy_source(x.q, x.q_stride, query, head * scores.head_dim, place), x.q_stride,
                              tile.end - query, place);
        const int i = threadIdx.x % QUERY_STEP, kind = threadIdx.x / QUERY_STEP;
        if (kind < 2)
            copy_async_4(base + STATISTICS_AT + (stage * 2 + kind) * STATISTICS_BYTES + i * 4,
                         (kind ? x.deltas : x.powers) + (i64)head * x.tokens + query + i, query + i < tile.end);
        copy_async_commit();
    };
    load_tile<KEYS>(keys, copy_source(x.k, x.k_stride, tile.first, kv_column, place), x.k_stride,
                    tile.last - tile.first, place);
    load_tile<KEYS>(values, copy_source(x.v, x.v_stride, tile.first, kv_column, place), x.v_stride,
                    tile.last - tile.first, place);
    int head = kv_head * group + x.part_head(part), query = tile.first;
    load_queries(head, query, 0);

    float dk[KEY_ROWS][OWN_CHUNKS][4] = {}, dv[KEY_ROWS][OWN_CHUNKS][4] = {}; // (keys, channels)

#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const int stage = step % 2;
        const u32 queries = base + QUERIES_AT + stage * QUERY_STEP * ROW_BYTES;
        const u32 statistics = base + STATISTICS_AT + stage * 2 * STATISTICS_BYTES + half * HALF_QUERIES * 4;
        // Now these queries have arrived, and no warp still reads the previous queries and do.
        copy_async_wait<0>();
        __syncthreads();
        load_tile<QUERY_STEP>(outputs, copy_source(x.dout, x.dout_stride, query, head * scores.head_dim, place),
                              x.dout_stride, tile.end - query, place);
        copy_async_commit();
        const int this_query = query;
        query += QUERY_STEP;
        if (query >= query_end) {
            query = tile.first;
            ++head;
        }
        if (step + 1 < steps)
            load_queries(head, query, 1 - stage);
        else
            copy_async_commit();

        float score[KEY_ROWS][HALF_STEPS * 2][4], gradient[KEY_ROWS][HALF_STEPS * 2][4]; // (keys, queries)
        tile_matmul(score, keys, first_row, queries, half * HALF_QUERIES, places);
        copy_async_wait<1>();
        __syncthreads();
        tile_matmul(gradient, values, first_row, outputs, half * HALF_QUERIES, places);

        const bool whole =
            this_query >= tile.first + KEYS - 1 && this_query + QUERY_STEP - 1 - tile.first < scores.window;
        float2 power[HALF_STEPS * 2], delta[HALF_STEPS * 2];
#pragma unroll
        for (int n = 0; n < HALF_STEPS * 2; ++n) {
            power[n] = shared_load_floats(statistics + (n * 8 + 2 * t) * 4);
            delta[n] = shared_load_floats(statistics + STATISTICS_BYTES + (n * 8 + 2 * t) * 4);
        }
        const int apart = this_query + half * HALF_QUERIES + 2 * t - (tile.first + first_row + g);
        differentiate(
            score, gradient, whole, scores, [&](int, int n, int i) { return i % 2 ? power[n].y : power[n].x; },
            [&](int, int n, int i) { return i % 2 ? delta[n].y : delta[n].x; },
            [&](int m, int n, int i) { return apart + n * 8 + i % 2 - m * 16 - i / 2 * 8; });

        // Fragments are exchanged as they are: the registers of a lane go to the same lane of the other warp.
        const u32 mine = base + EXCHANGE_AT + warp * 2 * EXCHANGE_BYTES + lane * 16;
        const u32 theirs = base + EXCHANGE_AT + (warp ^ 1) * 2 * EXCHANGE_BYTES + lane * 16;
        u32 p[HALF_STEPS][KEY_ROWS][4], ds[HALF_STEPS][KEY_ROWS][4];
#pragma unroll
        for (int part = 0; part < HALF_STEPS; ++part) {
            as_left(p[part], score, part);
            as_left(ds[part], gradient, part);
#pragma unroll
            for (int m = 0; m < KEY_ROWS; ++m) {
                shared_store_16(mine + (part * KEY_ROWS + m) * FRAGMENT_BYTES, p[part][m]);
                shared_store_16(mine + EXCHANGE_BYTES + (part * KEY_ROWS + m) * FRAGMENT_BYTES, ds[part][m]);
            }
        }
#pragma unroll
        for (int part = 0; part < HALF_STEPS; ++part) {
            const int row = half * HALF_QUERIES + part * 16;
            add_matmul(dv, p[part], outputs, row, first_chunk, places);
            add_matmul(dk, ds[part], queries, row, first_chunk, places);
        }
        barrier_of(1 + pair, 2 * WARP);
#pragma unroll
        for (int part = 0; part < HALF_STEPS; ++part) {
            const int row = (1 - half) * HALF_QUERIES + part * 16;
            u32 left[KEY_ROWS][4];
#pragma unroll
            for (int m = 0; m < KEY_ROWS; ++m)
                shared_load_16(left[m], theirs + (part * KEY_ROWS + m) * FRAGMENT_BYTES);
            add_matmul(dv, left, outputs, row, first_chunk, places);
#pragma unroll
            for (int m = 0; m < KEY_ROWS; ++m)
                shared_load_16(left[m], theirs + EXCHANGE_BYTES + (part * KEY_ROWS + m) * FRAGMENT_BYTES);
            add_matmul(dk, left, queries, row, first_chunk, places);
        }
    }

    // Keys and values are no longer needed, so their shared memory is used to write the result.
    copy_async_wait<0>();
    __syncthreads();
    const int rows = min(WARP_KEYS, tile.last - tile.first - first_row);
#pragma unroll
    for (int m = 0; m < KEY_ROWS; ++m)
#pragma unroll
        for (int n = 0; n < OWN_CHUNKS; ++n) {
            put_fragment(keys, first_row + m * 16, first_chunk + n, dk[m][n], scores.scale, scores.scale);
            put_fragment(values, first_row + m * 16, first_chunk + n, dv[m][n], 1.0f, 1.0f);
        }
    __syncwarp();
    if (rows > 0) {
        const i64 token = tile.first + first_row, part_at = part * x.part_elements;
        store_rows(x.dk + part_at + token * x.dk_stride + kv_column, x.dk_stride, keys, first_row, rows, first_chunk,
                   OWN_CHUNKS, scores.head_dim);
        store_rows(x.dv + part_at + token * x.dv_stride + kv_column, x.dv_stride, values, first_row, rows, first_chunk,
                   OWN_CHUNKS, scores.head_dim);
    }
}

#define ROW_FRAGMENTS (WARP_QUERIES / 16)
#define KEY_FRAGMENTS (KEY_STEP / 8)
#define QUERY_BYTES (QUERIES * ROW_BYTES)
#define STEP_BYTES (KEY_STEP * ROW_BYTES)

// dq of one tile of queries of one head, with the loop of the forward pass. Shared memory: queries, do, and two stages
// of keys and values.
__device__ __forceinline__ void gradients_of_queries(const GradOperands &x, const Scores &scores, Tile tile, int head) {
    const int warp = threadIdx.x / WARP / SHARERS, first_chunk = threadIdx.x / WARP % SHARERS * (CHUNKS / SHARERS);
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const u32 queries = shared_base(), outputs = queries + QUERY_BYTES, ring = outputs + QUERY_BYTES;
    const LanePlaces places = lane_places();
    const CopyPlace place = copy_place(scores.head_dim);
    const int column = head * scores.head_dim, kv_column = head / (x.heads / x.kv_heads) * scores.head_dim;
    const int seen_from = max(tile.begin, tile.first + 1 - scores.window);
    const int first_key = tile.begin + (seen_from - tile.begin) / KEY_STEP * KEY_STEP;
    const int key_tiles = (tile.last - first_key + KEY_STEP - 1) / KEY_STEP;

    int key = first_key + (key_tiles - 1) * KEY_STEP;
    const act *k_source = copy_source(x.k, x.k_stride, key, kv_column, place);
    const act *v_source = copy_source(x.v, x.v_stride, key, kv_column, place);
    auto load_keys = [&](int stage, int rows) {
        const u32 to = ring + stage * 2 * STEP_BYTES;
        load_tile<KEY_STEP>(to, k_source, x.k_stride, rows, place);
        load_tile<KEY_STEP>(to + STEP_BYTES, v_source, x.v_stride, rows, place);
        copy_async_commit();
        k_source -= KEY_STEP * x.k_stride;
        v_source -= KEY_STEP * x.v_stride;
    };
    load_tile<QUERIES>(queries, copy_source(x.q, x.q_stride, tile.first, column, place), x.q_stride,
                       tile.last - tile.first, place);
    load_tile<QUERIES>(outputs, copy_source(x.dout, x.dout_stride, tile.first, column, place), x.dout_stride,
                       tile.last - tile.first, place);
    load_keys(0, tile.end - key);

    const int warp_query = tile.first + warp * WARP_QUERIES, rows = min(WARP_QUERIES, tile.last - warp_query);
    float power[ROW_FRAGMENTS][2], delta[ROW_FRAGMENTS][2];
#pragma unroll
    for (int m = 0; m < ROW_FRAGMENTS; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = m * 16 + r * 8 + g;
            const i64 at = (i64)head * x.tokens + warp_query + row;
            power[m][r] = row < rows ? x.powers[at] : 0.0f;
            delta[m][r] = row < rows ? x.deltas[at] : 0.0f;
        }
    float dq[ROW_FRAGMENTS][CHUNKS / SHARERS][4] = {}; // (queries, own channels)

#pragma unroll 1
    for (int step = 0; step < key_tiles; ++step, key -= KEY_STEP) {
        copy_async_wait<0>();
        __syncthreads();
        if (step + 1 < key_tiles)
            load_keys((step + 1) % 2, KEY_STEP);
        // All keys of this tile come after the warp's queries.
        if (key > warp_query + WARP_QUERIES - 1)
            continue;
        const u32 keys = ring + step % 2 * 2 * STEP_BYTES, values = keys + STEP_BYTES;
        float score[ROW_FRAGMENTS][KEY_FRAGMENTS][4], gradient[ROW_FRAGMENTS][KEY_FRAGMENTS][4]; // (queries, keys)
        tile_matmul(score, queries, warp * WARP_QUERIES, keys, 0, places);
        tile_matmul(gradient, outputs, warp * WARP_QUERIES, values, 0, places);
        const bool whole = key + KEY_STEP - 1 <= warp_query && key > warp_query + WARP_QUERIES - 1 - scores.window;
        const int apart = warp_query + g - (key + 2 * t);
        differentiate(
            score, gradient, whole, scores, [&](int m, int, int i) { return power[m][i / 2]; },
            [&](int m, int, int i) { return delta[m][i / 2]; },
            [&](int m, int n, int i) { return apart + m * 16 + i / 2 * 8 - n * 8 - i % 2; });
#pragma unroll
        for (int part = 0; part < KEY_STEP / 16; ++part) {
            u32 left[ROW_FRAGMENTS][4];
            as_left(left, gradient, part);
            add_matmul(dq, left, keys, part * 16, first_chunk, places);
        }
    }

    if (SHARERS > 1)
        __syncthreads();
    else
        __syncwarp();
#pragma unroll
    for (int m = 0; m < ROW_FRAGMENTS; ++m)
#pragma unroll
        for (int n = 0; n < CHUNKS / SHARERS; ++n)
            put_fragment(queries, warp * WARP_QUERIES + m * 16, first_chunk + n, dq[m][n], scores.scale, scores.scale);
    __syncwarp();
    if (rows > 0)
        store_rows(x.dq + warp_query * x.dq_stride + column, x.dq_stride, queries, warp * WARP_QUERIES, rows, first_chunk,
                   CHUNKS / SHARERS, scores.head_dim);
}

#endif

// The plain form, without tiles: each warp processes one key, or one query, at a time.

// p and ds of one query and one key.
__device__ __forceinline__ float2 one_score(const float (&q)[OWN], const float (&k)[OWN], const float (&v)[OWN],
                                            const float (&dout)[OWN], float power, float delta, const Scores &scores) {
    float score = dot(q, k) * scores.scale, slope = 1.0f;
    const float gradient = dot(dout, v);
    if (scores.cap > 0.0f) {
        const float t = tanhf(score / scores.cap);
        score = t * scores.cap;
        slope = 1.0f - t * t;
    }
    const float p = exp2f(score * LOG2_E - power);
    return make_float2(p, p * (gradient - delta) * slope);
}

__device__ __forceinline__ void plain_gradients_of_keys(const GradOperands &x, const Scores &scores, Tile tile,
                                                        int kv_head, int part) {
    const int first_head = kv_head * (x.heads / x.kv_heads), head_dim = scores.head_dim;
    const i64 kv_column = (i64)kv_head * head_dim, part_at = part * x.part_elements;
    for (int key = tile.first + threadIdx.x / WARP; key < tile.last; key += THREADS / WARP) {
        float k[OWN], v[OWN], q[OWN], dout[OWN], dk[OWN] = {}, dv[OWN] = {};
        read_row(k, x.k + key * x.k_stride + kv_column, head_dim);
        read_row(v, x.v + key * x.v_stride + kv_column, head_dim);
        for (int head = first_head + x.part_head(part); head < first_head + x.part_head(part + 1); ++head)
            for (int query = key; query < min(tile.end, key + scores.window); ++query) {
                read_row(q, x.q + query * x.q_stride + (i64)head * head_dim, head_dim);
                read_row(dout, x.dout + query * x.dout_stride + (i64)head * head_dim, head_dim);
                const i64 at = (i64)head * x.tokens + query;
                const float2 found = one_score(q, k, v, dout, x.powers[at], x.deltas[at], scores);
                for (int i = 0; i < OWN; ++i) {
                    dv[i] += found.x * dout[i];
                    dk[i] += found.y * q[i];
                }
            }
        write_row(x.dk + part_at + key * x.dk_stride + kv_column, dk, scores.scale, head_dim);
        write_row(x.dv + part_at + key * x.dv_stride + kv_column, dv, 1.0f, head_dim);
    }
}

__device__ __forceinline__ void plain_gradients_of_queries(const GradOperands &x, const Scores &scores, Tile tile, int head) {
    const int head_dim = scores.head_dim;
    const i64 column = (i64)head * head_dim, kv_column = (i64)(head / (x.heads / x.kv_heads)) * head_dim;
    for (int query = tile.first + threadIdx.x / WARP; query < tile.last; query += THREADS / WARP) {
        float k[OWN], v[OWN], q[OWN], dout[OWN], dq[OWN] = {};
        read_row(q, x.q + query * x.q_stride + column, head_dim);
        read_row(dout, x.dout + query * x.dout_stride + column, head_dim);
        const i64 at = (i64)head * x.tokens + query;
        for (int key = max(tile.begin, query + 1 - scores.window); key <= query; ++key) {
            read_row(k, x.k + key * x.k_stride + kv_column, head_dim);
            read_row(v, x.v + key * x.v_stride + kv_column, head_dim);
            const float2 found = one_score(q, k, v, dout, x.powers[at], x.deltas[at], scores);
            for (int i = 0; i < OWN; ++i)
                dq[i] += found.y * k[i];
        }
        write_row(x.dq + query * x.dq_stride + column, dq, scores.scale, head_dim);
    }
}

// Grid: first `key_blocks` blocks (possible tiles of keys times key heads times parts), then possible tiles of queries
// times heads. The kernel on tiles has TILE_CUT times as many of both.
#define GRAD_PARAMETERS                                                                                               \
    const act *q, i64 q_stride, const act *k, i64 k_stride, const act *v, i64 v_stride, const act *dout,              \
        i64 dout_stride, act *dq, i64 dq_stride, act *dk, i64 dk_stride, act *dv, i64 dv_stride,                      \
        const float *powers, const float *deltas, const int4 *query_list, const int4 *key_list, int key_blocks,       \
        int tokens, int heads, int kv_heads, int parts, i64 part_elements, int head_dim, int window, float scale,     \
        float cap
#define GRAD_WORK(of_keys, of_queries, TILES)                                                                           \
    const Scores scores{head_dim, window, scale, cap};                                                                \
    const GradOperands operands{q,           k,         v,         dout,      dq,     dk,     dv,                     \
                                q_stride,    k_stride,  v_stride,  dout_stride, dq_stride, dk_stride, dv_stride,      \
                                powers,      deltas,    tokens,    heads,     kv_heads, parts, part_elements};        \
    const int block = blockIdx.x, sharers = kv_heads * parts;                                                         \
    Tile tile;                                                                                                        \
    if (block < key_blocks) {                                                                                         \
        if (read_part<TILES, KEYS>(key_list, block / sharers, tile))                                                  \
            of_keys(operands, scores, tile, block % sharers / parts, block % parts);                                  \
    } else if (read_part<TILES, QUERIES>(query_list, (block - key_blocks) / heads, tile)) {                           \
        of_queries(operands, scores, tile, (block - key_blocks) % heads);                                             \
    }

// dk and dv (T, C) = the sum of their parts (part, 2, T, C), in order. C is a multiple of 8 and rows are aligned to
// 16 bytes. Grid: ceil(2 · T · C / 8 / THREADS).
extern "C" __global__ void __launch_bounds__(THREADS)
    FOR_HEAD(attention_grad_sum_)(const act *from, int parts, int tokens, int columns, act *dk, i64 dk_stride, act *dv,
                                  i64 dv_stride) {
    const int chunks = columns / 8;
    const i64 item = (i64)blockIdx.x * THREADS + threadIdx.x, half = (i64)tokens * chunks;
    if (item >= 2 * half)
        return;
    const int row = (int)(item % half / chunks), column = (int)(item % chunks) * 8;
    float sum[8] = {};
#pragma unroll 4
    for (int part = 0; part < parts; ++part) {
        float x[8];
        load_eight<act>(from + (part * 2 * half + item) * 8, x);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            sum[i] += x[i];
    }
    store_eight<act>((item < half ? dk + row * dk_stride : dv + row * dv_stride) + column, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) FOR_HEAD(attention_grad_plain_)(GRAD_PARAMETERS) {
    GRAD_WORK(plain_gradients_of_keys, plain_gradients_of_queries, 1)
}

// Dynamic shared memory: the larger of STATISTICS_AT + 4 · STATISTICS_BYTES and 2 · QUERY_BYTES + 4 · STEP_BYTES.
#if defined(ACT_F32)
extern "C" __global__ void __launch_bounds__(THREADS) FOR_HEAD(attention_grad_)(GRAD_PARAMETERS) {
    GRAD_WORK(plain_gradients_of_keys, plain_gradients_of_queries, 1)
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 2) FOR_HEAD(attention_grad_)(GRAD_PARAMETERS) {
    GRAD_WORK(gradients_of_keys, gradients_of_queries, TILE_CUT)
}
#endif
