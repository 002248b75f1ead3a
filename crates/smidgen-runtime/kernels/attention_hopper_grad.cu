// Causal attention over packed segments, backward, for Hopper: computes the same as `attention_grad.cu`, which has the
// derivation, with warpgroup matrix instructions. The preparation and the sum of parts are kernels of
// `attention_grad.cu`.
//
// Both kinds of items have two resident tiles of 128 rows and stream pairs of tiles of 64 rows. In an item of keys, k
// and v are resident, q and do of the part's heads are streamed, and scores are computed with one key per row, so that
// p and ds are left operands of dv = pᵀ·do and dk = dsᵀ·q without a transposition. In an item of queries, q and do are
// resident (in registers, if heads have 128 channels), k and v are streamed, and dq = ds·k. p and ds never go through
// shared memory. The next scores are started while a warpgroup's last matmuls are pending, and one warpgroup multiplies
// while the other computes exponentials. Registers limit how much can be pending: dk, dv, scores and dp use 192 of
// them. Items of keys come first, and within each kind the longest come first. The key list has tiles of ITEM_ROWS
// keys.

#define STEP 64
#define PAIR_BYTES (2 * TILE_BYTES(STEP))
#define STATISTICS_BYTES (STEP * 4)
#define FIRST_AT 0
#define SECOND_AT TILE_BYTES(ITEM_ROWS)
#define RING_AT (2 * TILE_BYTES(ITEM_ROWS))
#define STAGING_AT (RING_AT + SLOTS * PAIR_BYTES)
#define STATISTICS_AT (STAGING_AT + TILE_BYTES(ITEM_ROWS))
#define CONTROL_AT (STATISTICS_AT + SLOTS * 2 * STATISTICS_BYTES)

#if defined(TURNS)
#define TAKE_TURN barrier_of(FIRST_TURN + group, 256)
#define PASS_TURN barrier_arrive_named(FIRST_TURN + 1 - group, 256)
#else
#define TAKE_TURN
#define PASS_TURN
#endif

#define OF_QUERIES 0
#define OF_KEYS 1
// Whether the left operands of an item are in registers. Not for heads of 64: with them, dq was wrong from the second
// tile of keys on (`benches/attention_check.py`), for a reason that was not found.
#define LEFT_IN_REGISTERS(kind) ((kind) == OF_QUERIES && HEAD == 128)

struct GradOperands {
    const act *q, *k, *v, *dout;
    // `dk` and `dv` point to part 0. Each further part begins `part_elements` after the previous one.
    act *dq, *dk, *dv;
    i64 q_stride, k_stride, v_stride, dout_stride, dq_stride, dk_stride, dv_stride;
    // (H, T)
    const float *powers, *deltas;
    const int4 *query_list;
    int4 *key_list;
    int tokens, heads, kv_heads, head_dim, parts;
    i64 part_elements;
    float scale;

    // First query head of a part, counted from the first one of its key head.
    __device__ __forceinline__ int part_head(int part) const { return part * (heads / kv_heads) / parts; }
};

__device__ __forceinline__ int tiles_of(int tokens) { return (tokens + STEP - 1) / STEP; }

__device__ __forceinline__ Item item_of(const GradOperands &x, int index, int key_items) {
    const bool of_keys = index < key_items;
    const int in_kind = of_keys ? index : index - key_items, sharers = of_keys ? x.kv_heads * x.parts : x.heads;
    const int4 entry = (of_keys ? x.key_list : x.query_list)[1 + in_kind / sharers];
    const Tile tile{entry.x, entry.y, entry.z, entry.w};
    const int at = in_kind % sharers;
    return of_keys ? Item{OF_KEYS, at / x.parts, at % x.parts, tile} : Item{OF_QUERIES, at, 0, tile};
}

__device__ __forceinline__ void copy_items(const GradOperands &x, u32 base) {
    const u32 control = base + CONTROL_AT;
    const int key_items = x.key_list[0].x * x.kv_heads * x.parts, items = key_items + x.query_list[0].x * x.heads;
    const int group = x.heads / x.kv_heads;
    int next = blockIdx.x;
    Copies copies;
    Ring ring;
#pragma unroll 1
    for (u32 round = 0;; ++round) {
        const u32 item_at = control + ITEM_AT + round % 2 * ITEM_BYTES;
        Item item{-1, 0, 0, Tile{0, 0, 0, 0}};
        if (threadIdx.x == 0 && next < items) {
            item = item_of(x, next, key_items);
            next = gridDim.x + atomicAdd(&x.key_list[0].y, 1);
        }
        copies.await(control + RESIDENT_EMPTY, round % 2 ^ 1);
        share_item(item, item_at);
        if (item.kind < 0) {
            copies.finish();
            warp_arrive(control + RESIDENT_FULL);
            return;
        }
        const Tile tile = item.tile;
        const bool of_keys = item.kind == OF_KEYS;
        const int kv_column = (of_keys ? item.head : item.head / group) * x.head_dim;
        int head = of_keys ? item.head * group + x.part_head(item.part) : item.head;
        const int heads = of_keys ? x.part_head(item.part + 1) - x.part_head(item.part) : 1;
        // The resident pair of matrices (`stays`), and the streamed pair (`passes`).
        const act *stays[2] = {of_keys ? x.k : x.q, of_keys ? x.v : x.dout};
        const i64 stay_strides[2] = {of_keys ? x.k_stride : x.q_stride, of_keys ? x.v_stride : x.dout_stride};
        const act *passes[2] = {of_keys ? x.q : x.k, of_keys ? x.dout : x.v};
        const i64 pass_strides[2] = {of_keys ? x.q_stride : x.k_stride, of_keys ? x.dout_stride : x.v_stride};
#pragma unroll
        for (int i = 0; i < 2; ++i)
            copy_rows<ITEM_ROWS>(base + (i ? SECOND_AT : FIRST_AT),
                                 stays[i] + tile.first * stay_strides[i] + (of_keys ? kv_column : head * x.head_dim),
                                 stay_strides[i], tile.last - tile.first, x.head_dim);
        copies.commit(control + RESIDENT_FULL);
        const int tiles = of_keys ? tiles_of(tile.end - tile.first) : tiles_of(tile.last - tile.begin);
#pragma unroll 1
        for (int step = 0; step < tiles * heads; ++step) {
            const int token = of_keys ? tile.first + step % tiles * STEP : tile.begin + (tiles - 1 - step) * STEP;
            if (of_keys && step > 0 && step % tiles == 0)
                ++head;
            copies.await(control + SLOT_EMPTY(ring.slot), ring.pass ^ 1);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                copy_rows<STEP>(base + RING_AT + ring.slot * PAIR_BYTES + i * TILE_BYTES(STEP),
                                passes[i] + token * pass_strides[i] + (of_keys ? head * x.head_dim : kv_column),
                                pass_strides[i], tile.end - token, x.head_dim);
            if (of_keys) {
                const int i = threadIdx.x % STEP, kind = threadIdx.x / STEP;
                copy_async_4(base + STATISTICS_AT + (ring.slot * 2 + kind) * STATISTICS_BYTES + i * 4,
                             (kind ? x.deltas : x.powers) + (i64)head * x.tokens + token + i, token + i < tile.end);
            }
            copies.commit(control + SLOT_FULL(ring.slot));
            ring.advance();
        }
    }
}

// Processes one item with one warpgroup. Rows and tokens are counted from the first token of the item's tile.
template <int KIND>
__device__ __forceinline__ void multiply_item(const GradOperands &x, u32 base, u32 item_at, Ring &ring) {
    const u32 control = base + CONTROL_AT;
    const int group = uniform(threadIdx.x / 128 - 1), warp = threadIdx.x / WARP % 4, lane = threadIdx.x % WARP;
    const int g = lane / 4, t = lane % 4, first = group * 64, warp_row = first + warp * 16;
    const Item item = get_item(item_at);
    // Begin and end of the streamed rows. An item of keys streams them once for each head of the part.
    const int begin = uniform(KIND == OF_KEYS ? 0 : item.tile.begin - item.tile.first);
    const int end = uniform((KIND == OF_KEYS ? item.tile.end : item.tile.last) - item.tile.first);
    int steps = tiles_of(end - begin);
    int passing = KIND == OF_KEYS ? 0 : begin + (steps - 1) * STEP;
    if (KIND == OF_KEYS)
        steps *= uniform(x.part_head(item.part + 1) - x.part_head(item.part));
    // Query minus key of the lane's first element, if the streamed tile began at row 0.
    const int apart = KIND == OF_KEYS ? 2 * t - (warp_row + g) : warp_row + g - 2 * t;
    // For items of keys, the first query that sees a key of this warpgroup. For items of queries, the first query of
    // this warpgroup. If the warpgroup has no rows, every streamed tile is skipped.
    const int bound = first >= uniform(item.tile.last - item.tile.first) ? (KIND == OF_KEYS ? 1 << 30 : -(1 << 30)) : first;
    const float to_power = x.scale * LOG2_E;

    // Items of queries keep in registers the resident rows, and lse and delta of the rows g and g + 8.
    u32 left[LEFT_IN_REGISTERS(KIND) ? 2 * HEAD_STEPS : 1][4];
    float power[2], delta[2];
    if constexpr (LEFT_IN_REGISTERS(KIND)) {
        const u32 here = opaque(base);
#pragma unroll
        for (int i = 0; i < 2 * HEAD_STEPS; ++i)
            load_matrices(left[i], here + (i < HEAD_STEPS ? FIRST_AT : SECOND_AT) +
                                       place_in_panels(ITEM_ROWS, warp_row + lane % 16, i % HEAD_STEPS * 2 + lane / 16));
        warp_arrive(control + RESIDENT_EMPTY);
    }
    if constexpr (KIND == OF_QUERIES) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = warp_row + g + r * 8;
            const i64 at = (i64)item.head * x.tokens + item.tile.first + row;
            power[r] = row < end ? x.powers[at] : 0.0f;
            delta[r] = row < end ? x.deltas[at] : 0.0f;
        }
    }
    const u32 first_left = rows_descriptor(base + FIRST_AT + first * 128);
    const u32 second_left = rows_descriptor(base + SECOND_AT + first * 128);

    // dk or dq, and dv: (rows, channels).
    float along[HEAD / 2], values[KIND == OF_KEYS ? HEAD / 2 : 1];
#pragma unroll
    for (int i = 0; i < HEAD / 2; ++i)
        along[i] = 0.0f;
    if constexpr (KIND == OF_KEYS) {
#pragma unroll
        for (int i = 0; i < HEAD / 2; ++i)
            values[i] = 0.0f;
    }
    u32 p[KIND == OF_KEYS ? STEP / 16 : 1][4] = {}, ds[STEP / 16][4] = {};
    // The slot that pending matmuls still read.
    int held = -1;

    TAKE_TURN;
    // There is always at least one step. A `while` loop would have a path without any matmul, and the compiler would
    // then treat pending matmuls as done.
#pragma unroll 1
    do {
        const int these = passing;
        if (KIND == OF_KEYS)
            passing = passing + STEP < end ? passing + STEP : 0;
        else
            passing -= STEP;
        const u32 slot = ring.slot;
        barrier_wait(control + SLOT_FULL(slot), ring.pass);
        ring.advance();
        // The whole tile is masked, or the warpgroup has no rows.
        if (KIND == OF_KEYS ? these + STEP <= bound : these >= bound + 64) {
            warp_arrive(control + SLOT_EMPTY(slot));
            PASS_TURN;
            TAKE_TURN;
            continue;
        }
        const u32 pair = base + RING_AT + slot * PAIR_BYTES;
        const u32 first_right = rows_descriptor(pair), second_right = rows_descriptor(pair + TILE_BYTES(STEP));
        float score[STEP / 2], gradient[STEP / 2]; // (rows, streamed rows)
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < HEAD_STEPS; ++i) {
            if constexpr (LEFT_IN_REGISTERS(KIND))
                multiply_rows(score, left[i], further(first_right, STEP_AT(STEP, i)), i > 0);
            else
                multiply_rows(score, further(first_left, STEP_AT(ITEM_ROWS, i)), further(first_right, STEP_AT(STEP, i)),
                              i > 0);
        }
        wgmma_commit();
        PASS_TURN;
        wgmma_wait<0>();
        settle(score);
        settle(ds);
        settle(p);
        if (held >= 0)
            warp_arrive(control + SLOT_EMPTY(held));
        held = slot;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < HEAD_STEPS; ++i) {
            if constexpr (LEFT_IN_REGISTERS(KIND))
                multiply_rows(gradient, left[HEAD_STEPS + i], further(second_right, STEP_AT(STEP, i)), i > 0);
            else
                multiply_rows(gradient, further(second_left, STEP_AT(ITEM_ROWS, i)),
                              further(second_right, STEP_AT(STEP, i)), i > 0);
        }
        wgmma_commit();

        if (KIND == OF_KEYS ? these < first + 63 : these + STEP - 1 > first) {
            const int from = KIND == OF_KEYS ? these + apart : apart - these;
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int along_rows = i / 2 * 8, along_columns = n * 8 + i % 2;
                    if (from + (KIND == OF_KEYS ? along_columns - along_rows : along_rows - along_columns) < 0)
                        score[n * 4 + i] = -infinity();
                }
        }
        const u32 statistics = base + STATISTICS_AT + slot * 2 * STATISTICS_BYTES + 2 * t * 4;
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            float2 of_columns = make_float2(0.0f, 0.0f);
            if constexpr (KIND == OF_KEYS)
                of_columns = shared_load_floats(statistics + n * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float less = KIND == OF_KEYS ? (i % 2 ? of_columns.y : of_columns.x) : power[i / 2];
                score[n * 4 + i] = power_of_two(fmaf(score[n * 4 + i], to_power, -less));
            }
        }
        wgmma_wait<0>();
        settle(gradient);
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            float2 of_columns = make_float2(0.0f, 0.0f);
            if constexpr (KIND == OF_KEYS)
                of_columns = shared_load_floats(statistics + STATISTICS_BYTES + n * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float less = KIND == OF_KEYS ? (i % 2 ? of_columns.y : of_columns.x) : delta[i / 2];
                gradient[n * 4 + i] = score[n * 4 + i] * (gradient[n * 4 + i] - less);
            }
        }
#pragma unroll
        for (int part = 0; part < STEP / 16; ++part) {
            if constexpr (KIND == OF_KEYS)
                round_left(p[part], score, part);
            round_left(ds[part], gradient, part);
        }
        TAKE_TURN;
        wgmma_fence();
        if constexpr (KIND == OF_KEYS) {
            const u32 outputs = columns_descriptor(pair + TILE_BYTES(STEP), PANEL_BYTES(STEP));
#pragma unroll
            for (int part = 0; part < STEP / 16; ++part)
                multiply_columns(values, p[part], further(outputs, part * 2048));
        }
        const u32 right = columns_descriptor(pair, PANEL_BYTES(STEP));
#pragma unroll
        for (int part = 0; part < STEP / 16; ++part)
            multiply_columns(along, ds[part], further(right, part * 2048));
        wgmma_commit();
    } while (--steps > 0);
    PASS_TURN;
    wgmma_wait<0>();
    settle(ds);
    settle(p);
    settle(along);
    if (held >= 0)
        warp_arrive(control + SLOT_EMPTY(held));

    // Reloaded here, so that it uses no registers in the loop.
    const Item done = get_item(opaque(item_at));
    const i64 token = done.tile.first + warp_row;
    const int rows = done.tile.last - (int)token;
    const u32 staging = base + STAGING_AT;
    if constexpr (!LEFT_IN_REGISTERS(KIND))
        warp_arrive(control + RESIDENT_EMPTY);
    if constexpr (KIND == OF_KEYS) {
        settle(values);
        const i64 at = done.part * x.part_elements + done.head * x.head_dim;
        write_result(x.dv + at + token * x.dv_stride, x.dv_stride, rows, x.head_dim, staging, values, 1.0f, 1.0f);
        write_result(x.dk + at + token * x.dk_stride, x.dk_stride, rows, x.head_dim, staging, along, x.scale, x.scale);
    } else {
        write_result(x.dq + token * x.dq_stride + done.head * x.head_dim, x.dq_stride, rows, x.head_dim, staging, along,
                     x.scale, x.scale);
    }
}

// Grid: one block per multiprocessor, or per item if there are fewer. Dynamic shared memory:
// CONTROL_AT + CONTROL_BYTES.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    FOR_HEAD(attention_grad_hopper_)(const act *q, i64 q_stride, const act *k, i64 k_stride, const act *v, i64 v_stride,
                                     const act *dout, i64 dout_stride, act *dq, i64 dq_stride, act *dk, i64 dk_stride,
                                     act *dv, i64 dv_stride, const float *powers, const float *deltas,
                                     const int4 *query_list, int4 *key_list, int tokens, int heads, int kv_heads,
                                     int head_dim, int parts, i64 part_elements, float scale) {
    const GradOperands x{q,          k,        v,        dout,        dq,        dk,        dv,        q_stride,
                         k_stride,   v_stride, dout_stride, dq_stride, dk_stride, dv_stride, powers,   deltas,
                         query_list, key_list, tokens,   heads,       kv_heads,  head_dim,  parts,     part_elements,
                         scale};
    const u32 base = shared_base();
    make_barriers(base + CONTROL_AT);
    if (threadIdx.x < 128) {
        lower_registers<COPYING_REGISTERS>();
        copy_items(x, base);
    } else {
        raise_registers<MULTIPLYING_REGISTERS>();
        Ring ring;
        u32 round = 0;
#if defined(TURNS)
        if (threadIdx.x >= 256)
            barrier_arrive_named(FIRST_TURN, 256);
#endif
        // All items of keys come before those of queries. Two loops need fewer registers than one.
        auto next_kind = [&]() {
            barrier_wait(base + CONTROL_AT + RESIDENT_FULL, round % 2);
            return uniform(get_item(base + CONTROL_AT + ITEM_AT + round % 2 * ITEM_BYTES).kind);
        };
#pragma unroll 1
        for (; next_kind() == OF_KEYS; ++round)
            multiply_item<OF_KEYS>(x, base, base + CONTROL_AT + ITEM_AT + round % 2 * ITEM_BYTES, ring);
#pragma unroll 1
        for (; next_kind() == OF_QUERIES; ++round)
            multiply_item<OF_QUERIES>(x, base, base + CONTROL_AT + ITEM_AT + round % 2 * ITEM_BYTES, ring);
#if defined(TURNS)
        if (threadIdx.x < 256)
            barrier_of(FIRST_TURN, 256);
#endif
    }
}
