// Causal attention over packed segments, forward, for Hopper: computes the same as `attention.cu`, with warpgroup
// matrix instructions.
//
// An item is 128 queries of one head. Each consumer warpgroup has 64 of them and loops over tiles of 128 keys from the
// diagonal backwards. The scores of the next tile are started before the weights of the current tile are multiplied
// with their values, and the two warpgroups take turns, so that one multiplies while the other computes exponentials.
// Sums are rescaled as rarely as in `attention.cu`. The kernel is bound by the matmuls: 64 · 128 · 16 multiply-adds
// take 64 cycles, and the exponentials of a tile take half the time of its matmuls.

#if defined(NO_TURNS)
#define TAKE_TURN
#define PASS_TURN
#else
#define TAKE_TURN barrier_of(FIRST_TURN + group, 256)
#define PASS_TURN barrier_arrive_named(FIRST_TURN + 1 - group, 256)
#endif
#define KEYS 128
#define QUERIES_AT 0
#define RING_AT TILE_BYTES(ITEM_ROWS)
#define STAGING_AT (RING_AT + SLOTS * TILE_BYTES(KEYS))
#define CONTROL_AT (STAGING_AT + TILE_BYTES(ITEM_ROWS))
// The initial maximum: below any score, and finite, so that differences are not NaN.
#define NOTHING_SEEN -1e30f
// The power of two by which a row's maximum may grow before its sums are rescaled.
#define SLACK 8.0f

struct ForwardOperands {
    const act *q, *k, *v;
    act *o;
    float *lse;
    i64 q_stride, k_stride, v_stride, o_stride;
    int4 *list;
    int heads, kv_heads, head_dim;
    float scale;
};

// The number of tiles of keys of an item. The last one is on the diagonal.
__device__ __forceinline__ int key_tiles_of(const Tile &tile) { return (tile.last - tile.begin + KEYS - 1) / KEYS; }

__device__ __forceinline__ void copy_items(const ForwardOperands &x, u32 base) {
    const u32 control = base + CONTROL_AT;
    const int items = x.list[0].x * x.heads;
    int next = blockIdx.x;
    Copies copies;
    Ring ring;
#pragma unroll 1
    for (u32 round = 0;; ++round) {
        const u32 item_at = control + ITEM_AT + round % 2 * ITEM_BYTES;
        Item item{-1, 0, 0, Tile{0, 0, 0, 0}};
        if (threadIdx.x == 0 && next < items) {
            const int4 entry = x.list[1 + next / x.heads];
            item = Item{0, next % x.heads, 0, Tile{entry.x, entry.y, entry.z, entry.w}};
            next = gridDim.x + atomicAdd(&x.list[0].y, 1);
        }
        copies.await(control + RESIDENT_EMPTY, round % 2 ^ 1);
        share_item(item, item_at);
        if (item.kind < 0) {
            copies.finish();
            warp_arrive(control + RESIDENT_FULL);
            return;
        }
        const Tile tile = item.tile;
        copy_rows<ITEM_ROWS>(base + QUERIES_AT, x.q + tile.first * x.q_stride + item.head * x.head_dim,
                             x.q_stride, tile.last - tile.first, x.head_dim);
        copies.commit(control + RESIDENT_FULL);
        const int kv_column = item.head / (x.heads / x.kv_heads) * x.head_dim;
#pragma unroll 1
        for (int step = key_tiles_of(tile) - 1; step >= 0; --step) {
            const i64 key = tile.begin + step * KEYS;
#pragma unroll
            for (int values = 0; values < 2; ++values) {
                copies.await(control + SLOT_EMPTY(ring.slot), ring.pass ^ 1);
                const i64 stride = values ? x.v_stride : x.k_stride;
                copy_rows<KEYS>(base + RING_AT + ring.slot * TILE_BYTES(KEYS),
                                (values ? x.v : x.k) + key * stride + kv_column, stride, tile.end - (int)key,
                                x.head_dim);
                copies.commit(control + SLOT_FULL(ring.slot));
                ring.advance();
            }
        }
    }
}

__device__ __forceinline__ void multiply_items(const ForwardOperands &x, u32 base) {
    const u32 control = base + CONTROL_AT;
    const int group = uniform(threadIdx.x / 128 - 1), warp = threadIdx.x / WARP % 4, lane = threadIdx.x % WARP;
    const int g = lane / 4, t = lane % 4, warp_row = group * 64 + warp * 16;
    const u32 queries = rows_descriptor(base + QUERIES_AT + group * 64 * 128);
    const float to_power = x.scale * LOG2_E, slack = SLACK / to_power;
    // The first group has the first turn.
#if !defined(NO_TURNS)
    if (group == 1)
        barrier_arrive_named(FIRST_TURN, 256);
#endif
    Ring ring;
#pragma unroll 1
    for (u32 round = 0;; ++round) {
        barrier_wait(control + RESIDENT_FULL, round % 2);
        const Item item = get_item(control + ITEM_AT + round % 2 * ITEM_BYTES);
        if (uniform(item.kind) < 0)
            break;
        const Tile tile = item.tile;
        const int steps = uniform(key_tiles_of(tile));
        float output[HEAD / 2], score[KEYS / 2]; // (queries, channels), (queries, keys)
        u32 weights[KEYS / 16][4];
        // Running maximum and sum of the rows g and g + 8. A lane sums over its own columns only.
        float most[2] = {NOTHING_SEEN, NOTHING_SEEN}, sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < HEAD / 2; ++i)
            output[i] = 0.0f;

        auto begin_scores = [&](u32 slot) {
            const u32 keys = rows_descriptor(base + RING_AT + slot * TILE_BYTES(KEYS));
#pragma unroll
            for (int step = 0; step < HEAD_STEPS; ++step)
                multiply_rows(score, further(queries, STEP_AT(ITEM_ROWS, step)), further(keys, STEP_AT(KEYS, step)),
                              step > 0);
            wgmma_commit();
        };
        auto begin_outputs = [&](u32 slot) {
            const u32 values = columns_descriptor(base + RING_AT + slot * TILE_BYTES(KEYS), PANEL_BYTES(KEYS));
#pragma unroll
            for (int part = 0; part < KEYS / 16; ++part)
                multiply_columns(output, weights[part], further(values, part * 2048));
            wgmma_commit();
        };
        // Replaces the scores by weights in f32. Computes the factors by which earlier sums are rescaled, and returns
        // whether any of them is not 1.
        float factor[2];
        auto weigh = [&]() {
            bool grown = false;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float x = fmaxf(score[2 * r], score[2 * r + 1]);
#pragma unroll
                for (int n = 1; n < KEYS / 8; ++n)
                    x = fmaxf(x, fmaxf(score[n * 4 + 2 * r], score[n * 4 + 2 * r + 1]));
                x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, 1));
                x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, 2));
                const bool grows = x > most[r] + slack;
                const float next = grows ? x : most[r];
                factor[r] = power_of_two((most[r] - next) * to_power);
                most[r] = next;
                sum[r] *= factor[r];
                grown |= grows;
            }
            const float from[2] = {most[0] * to_power, most[1] * to_power};
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    score[n * 4 + i] = power_of_two(fmaf(score[n * 4 + i], to_power, -from[i / 2]));
                    sum[i / 2] += score[n * 4 + i];
                }
            return __any_sync(EVERY_LANE, grown);
        };
        auto round_weights = [&]() {
#pragma unroll
            for (int part = 0; part < KEYS / 16; ++part)
                round_left(weights[part], score, part);
        };

        // The tile on the diagonal comes first: there, keys after the query are masked.
        barrier_wait(control + SLOT_FULL(ring.slot), ring.pass);
        wgmma_fence();
        begin_scores(ring.slot);
        wgmma_wait<0>();
        settle(score);
        warp_arrive(control + SLOT_EMPTY(ring.slot));
        if (steps == 1)
            warp_arrive(control + RESIDENT_EMPTY);
        const int last = tile.first + warp_row + g - (tile.begin + (steps - 1) * KEYS) - 2 * t;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (n * 8 + i % 2 > last + i / 2 * 8)
                    score[n * 4 + i] = -infinity();
        weigh();
        round_weights();
        ring.advance();
        barrier_wait(control + SLOT_FULL(ring.slot), ring.pass);

        // Here the values of the previous step are in slot `ring`, and have arrived.
#pragma unroll 1
        for (int step = 1; step < steps; ++step) {
            const u32 values = ring.slot;
            ring.advance();
            const u32 keys = ring.slot;
            barrier_wait(control + SLOT_FULL(keys), ring.pass);
            ring.advance();
            TAKE_TURN;
            wgmma_fence();
            begin_scores(keys);
            begin_outputs(values);
            PASS_TURN;
            wgmma_wait<1>();
            settle(score);
            warp_arrive(control + SLOT_EMPTY(keys));
            if (step == steps - 1)
                warp_arrive(control + RESIDENT_EMPTY);
            const bool grown = weigh();
            // Keeps the compiler from moving the exponentials behind the next wait.
            settle(score);
            barrier_wait(control + SLOT_FULL(ring.slot), ring.pass);
            wgmma_wait<0>();
            settle(weights);
            settle(output);
            warp_arrive(control + SLOT_EMPTY(values));
            if (grown) {
#pragma unroll
                for (int i = 0; i < HEAD / 2; ++i)
                    output[i] *= factor[i / 2 % 2];
            }
            round_weights();
        }

        wgmma_fence();
        begin_outputs(ring.slot);
        wgmma_wait<0>();
        settle(weights);
        settle(output);
        warp_arrive(control + SLOT_EMPTY(ring.slot));
        ring.advance();

        const int rows = tile.last - tile.first - warp_row;
        const i64 query = tile.first + warp_row;
        float share[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = sum[r];
            total += __shfl_xor_sync(EVERY_LANE, total, 1);
            total += __shfl_xor_sync(EVERY_LANE, total, 2);
            share[r] = 1.0f / total;
            if (t == 0 && g + r * 8 < rows)
                x.lse[(query + g + r * 8) * x.heads + item.head] = (most[r] * to_power + log2f(total)) * LN_2;
        }
        write_result(x.o + query * x.o_stride + item.head * x.head_dim, x.o_stride, rows, x.head_dim, base + STAGING_AT,
                     output, share[0], share[1]);
    }
    // Takes the last turn, so that every arrival at the barrier is matched.
#if !defined(NO_TURNS)
    if (group == 0)
        barrier_of(FIRST_TURN, 256);
#endif
}

// Grid: one block per multiprocessor, or per item if there are fewer. Dynamic shared memory:
// CONTROL_AT + CONTROL_BYTES.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    FOR_HEAD(attention_hopper_)(const act *q, i64 q_stride, const act *k, i64 k_stride, const act *v, i64 v_stride,
                                act *o, i64 o_stride, float *lse, int4 *list, int heads, int kv_heads,
                                int head_dim, float scale) {
    const ForwardOperands x{q,        k,        v,    o,     lse,      q_stride, k_stride,
                            v_stride, o_stride, list, heads, kv_heads, head_dim, scale};
    const u32 base = shared_base();
    make_barriers(base + CONTROL_AT);
    if (threadIdx.x < 128) {
        lower_registers<COPYING_REGISTERS>();
        copy_items(x, base);
    } else {
        raise_registers<MULTIPLYING_REGISTERS>();
        multiply_items(x, base);
    }
}
