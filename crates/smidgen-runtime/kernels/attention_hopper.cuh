// Shared by the attention kernels for Hopper: tiles that matrix instructions read from shared memory, and the division
// of work among a block's three warpgroups.
//
// The kernels are persistent: one block per multiprocessor processes one work item (a tile of one head) after the
// other, the longest first. The result of an item does not depend on the block. Warpgroup 0 fetches items and copies
// tiles (the producer). The two others multiply (the consumers), each with 64 rows of the resident tile. Streamed tiles
// go through a ring of slots: the barrier `full` signals that a slot has been copied, `empty` that both consumers are
// done with it. The resident tile has two such barriers too, and the item is passed along with it. The item counter is
// the second number of a list of tiles (`attention_tiles.cuh`), which is reset before each launch.
// A tile of `rows` rows is stored as consecutive panels of 64 columns; see `warpgroup_unit.cuh`. A head of fewer than
// HEAD channels is padded with zeros there.
// Left out: windows and softcaps, which use the kernels for all GPUs.

#define BLOCK_THREADS 384
#define ITEM_ROWS 128
#define SLOTS 4
#define PANELS (HEAD / 64)
#define HEAD_STEPS (HEAD / 16)
#define PANEL_BYTES(rows) ((rows) * 128)
#define TILE_BYTES(rows) ((rows) * ROW_BYTES)
// Byte offset of the 16 elements of step `step` of the summed dimension, for a `rows_descriptor`.
#define STEP_AT(rows, step) ((step) / 4 * PANEL_BYTES(rows) + (step) % 4 * 32)

// Ids for `barrier_of`: one barrier among the copying warps, and one for the turn of each consumer.
#define COPYING_BARRIER 1
#define FIRST_TURN 2

// Registers per thread. A thread of each of the three warpgroups together have 504, at first 168 each.
#define COPYING_REGISTERS 40
#define MULTIPLYING_REGISTERS 232

// Byte offsets of the barriers, from CONTROL_AT of a kernel on.
#define RESIDENT_FULL 0
#define RESIDENT_EMPTY 8
#define SLOT_FULL(slot) (16 + (slot) * 8)
#define SLOT_EMPTY(slot) (16 + (SLOTS + (slot)) * 8)
#define BARRIERS_BYTES (16 + 2 * SLOTS * 8)
// After the barriers there is room for two items, which are used in turn.
#define ITEM_AT BARRIERS_BYTES
#define ITEM_BYTES 32
#define CONTROL_BYTES (BARRIERS_BYTES + 2 * ITEM_BYTES)

__device__ __forceinline__ u32 place_in_panels(int rows, int row, int chunk) {
    return chunk / 8 * PANEL_BYTES(rows) + row * 128 + ((chunk ^ row) % 8) * 16;
}

// The current slot of the ring, and the parity of the current pass over the ring.
struct Ring {
    u32 slot = 0, pass = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == SLOTS) {
            slot = 0;
            pass ^= 1;
        }
    }
};

// A work item: its `kind` depends on the kernel; -1 ends the block.
struct Item {
    int kind, head, part;
    Tile tile;
};

__device__ __forceinline__ Item get_item(u32 from) {
    u32 words[4], tile[4];
    shared_load_16(words, from);
    shared_load_16(tile, from + 16);
    return Item{(int)words[0], (int)words[1], (int)words[2],
                Tile{(int)tile[0], (int)tile[1], (int)tile[2], (int)tile[3]}};
}

// Shares thread 0's item with all copying threads, through `place`. The caller has waited until the resident tile is
// free, so both consumers have finished the item before the last, which used the same place.
__device__ __forceinline__ void share_item(Item &item, u32 place) {
    if (threadIdx.x == 0) {
        const u32 words[4] = {(u32)item.kind, (u32)item.head, (u32)item.part, 0};
        const u32 tile[4] = {(u32)item.tile.begin, (u32)item.tile.end, (u32)item.tile.first, (u32)item.tile.last};
        shared_store_16(place, words);
        shared_store_16(place + 16, tile);
    }
    barrier_of(COPYING_BARRIER, 128);
    item = get_item(place);
}

__device__ __forceinline__ void make_barriers(u32 control) {
    if (threadIdx.x == 0) {
        barrier_init(control + RESIDENT_FULL, 4);
        barrier_init(control + RESIDENT_EMPTY, 8);
        for (int slot = 0; slot < SLOTS; ++slot) {
            barrier_init(control + SLOT_FULL(slot), 4);
            barrier_init(control + SLOT_EMPTY(slot), 8);
        }
        fence_barrier_init();
    }
    __syncthreads();
}

// One arrival per warp, after all its lanes.
__device__ __forceinline__ void warp_arrive(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % WARP == 0)
        barrier_arrive(barrier);
}

// ── copies, by the 128 threads of warpgroup 0 ────────────────────────────────────────────────────

#define ROW_COPIERS (HEAD / 8)
#define ROWS_AT_ONCE (128 / ROW_COPIERS)

// At most two pending copies, oldest first. Each is represented by the barrier to arrive at when it is done.
struct Copies {
    u32 first, second;
    int pending = 0;

    __device__ __forceinline__ static void arrive(u32 barrier) {
        fence_stores_before_wgmma();
        warp_arrive(barrier);
    }

    // The copies since the last commit will arrive at `barrier` when they are done.
    __device__ __forceinline__ void commit(u32 barrier) {
        copy_async_commit();
        if (pending == 2) {
            copy_async_wait<2>();
            arrive(first);
            first = second;
            second = barrier;
        } else if (pending == 1) {
            second = barrier;
            pending = 2;
        } else {
            first = barrier;
            pending = 1;
        }
    }

    __device__ __forceinline__ void finish() {
        copy_async_wait<0>();
        if (pending > 0)
            arrive(first);
        if (pending > 1)
            arrive(second);
        pending = 0;
    }

    // Waits for free space. If it has to wait, it first finishes all pending copies: consumers may need them before
    // they free any space.
    __device__ __forceinline__ void await(u32 barrier, u32 parity) {
        if (!__all_sync(EVERY_LANE, barrier_has_passed(barrier, parity))) {
            finish();
            barrier_wait(barrier, parity);
        }
    }
};

// Starts to copy ROWS rows of a head of `head_dim` channels. Rows from `rows` on are filled with zeros. `from` is the
// first element of the head in the first row.
template <int ROWS>
__device__ __forceinline__ void copy_rows(u32 tile, const act *from, i64 stride, int rows, int head_dim) {
    const int row = threadIdx.x / ROW_COPIERS, chunk = threadIdx.x % ROW_COPIERS;
    const u32 to = tile + place_in_panels(ROWS, row, chunk);
    from += row * stride + chunk * 8;
    if (chunk * 8 >= head_dim)
        rows = 0;
#pragma unroll
    for (int pass = 0; pass < ROWS / ROWS_AT_ONCE; ++pass) {
        copy_async_16(to + pass * ROWS_AT_ONCE * 128, from, row + pass * ROWS_AT_ONCE < rows);
        from += ROWS_AT_ONCE * stride;
    }
}

// ── results, by the warps of the consumers ───────────────────────────────────────────────────────

// Keeps the compiler from precomputing values that depend on an address and holding them in registers.
__device__ __forceinline__ u32 opaque(u32 address) {
    asm volatile("" : "+r"(address));
    return address;
}

// Writes the 16 rows of this warp, times a factor for each half of the rows, through its part of `staging`. `to` is the
// first element of the head in the warp's first row.
__device__ __forceinline__ void write_result(act *to, i64 stride, int rows, int head_dim, u32 staging,
                                             const float (&c)[HEAD / 2], float upper, float lower) {
    const int warp = threadIdx.x / WARP - 4;
    staging = opaque(staging);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < HEAD / 8; ++n) {
        const float part[4] = {c[n * 4], c[n * 4 + 1], c[n * 4 + 2], c[n * 4 + 3]};
        put_fragment(staging, warp * 16, n, part, upper, lower);
    }
    __syncwarp();
    if (rows > 0)
        store_rows(to, stride, staging, warp * 16, min(rows, 16), 0, CHUNKS, head_dim);
}

// Columns 16 · step.. of a result, rounded, as the left operand of another matmul.
template <int N> __device__ __forceinline__ void round_left(u32 (&a)[4], const float (&c)[N], int step) {
    a[0] = pack_two<act>(c[8 * step], c[8 * step + 1]);
    a[1] = pack_two<act>(c[8 * step + 2], c[8 * step + 3]);
    a[2] = pack_two<act>(c[8 * step + 4], c[8 * step + 5]);
    a[3] = pack_two<act>(c[8 * step + 6], c[8 * step + 7]);
}
