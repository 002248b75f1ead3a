// What the attention kernels for Hopper share: tiles that matrix instructions read from shared memory, and the work of
// a block's three warpgroups.
//
// As many blocks as the GPU has multiprocessors stay and take one item after the other (a tile of one head), the longest
// first; whoever takes it, an item's numbers are the same. Warpgroup 0 fetches the items and copies tiles; two others
// multiply, each with 64 rows of the resident tile. Tiles that are walked over come through a ring of slots: `full` says
// that a slot has been copied, `empty` that both are done with it; the resident tile has two such barriers too, and
// with it comes the item. The counter of items is the second number of a list of tiles (`attention_tiles.cuh`), which
// is written anew before each launch.
// A tile of `rows` rows is panels of 64 columns, one after the other; see `warpgroup_unit.cuh`.
// Left out: windows and caps of scores, for which the kernels of all GPUs are taken.

#define BLOCK_THREADS 384
#define ITEM_ROWS 128
#define SLOTS 4
#define PANELS (HEAD / 64)
#define HEAD_STEPS (HEAD / 16)
#define PANEL_BYTES(rows) ((rows) * 128)
#define TILE_BYTES(rows) ((rows) * ROW_BYTES)
// Where 16 elements of the summed dimension begin in a row, for tiles by `rows_descriptor`.
#define STEP_AT(rows, step) ((step) / 4 * PANEL_BYTES(rows) + (step) % 4 * 32)

// Of `barrier_of`: among the copying warps, and the turns of the two others.
#define COPYING_BARRIER 1
#define FIRST_TURN 2

// A block has 504 registers for a thread of each of its three warpgroups, 168 at first.
#define COPYING_REGISTERS 40
#define MULTIPLYING_REGISTERS 232

// Barriers, after BARRIERS_AT of a kernel.
#define RESIDENT_FULL 0
#define RESIDENT_EMPTY 8
#define SLOT_FULL(slot) (16 + (slot) * 8)
#define SLOT_EMPTY(slot) (16 + (SLOTS + (slot)) * 8)
#define BARRIERS_BYTES (16 + 2 * SLOTS * 8)
// Items of two rounds, after the barriers.
#define ITEM_AT BARRIERS_BYTES
#define ITEM_BYTES 32
#define CONTROL_BYTES (BARRIERS_BYTES + 2 * ITEM_BYTES)

__device__ __forceinline__ u32 place_in_panels(int rows, int row, int chunk) {
    return chunk / 8 * PANEL_BYTES(rows) + row * 128 + ((chunk ^ row) % 8) * 16;
}

// A place in the ring, and the parity of the pass through it.
struct Ring {
    u32 slot = 0, pass = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == SLOTS) {
            slot = 0;
            pass ^= 1;
        }
    }
};

// What a block does next: `kind` of the kernel, or -1 to end.
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

// Thread 0's item becomes that of all copying threads, at `place`. The resident tile's place is free, so both groups
// have ended the item before the last, which was here.
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
        barriers_are_made();
    }
    __syncthreads();
}

// One arrival of a warp, when all its lanes are here.
__device__ __forceinline__ void warp_arrive(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % WARP == 0)
        barrier_arrive(barrier);
}

// ── copies, by the 128 threads of warpgroup 0 ────────────────────────────────────────────────────

#define ROW_COPIERS (HEAD / 8)
#define ROWS_AT_ONCE (128 / ROW_COPIERS)

// Copies under way, oldest first, by the barriers that are told when they are done; two at most.
struct Copies {
    u32 first, second;
    int pending = 0;

    __device__ __forceinline__ static void tell(u32 barrier) {
        order_stores_before_products();
        warp_arrive(barrier);
    }

    // What was copied since the last commit is told to `barrier`.
    __device__ __forceinline__ void commit(u32 barrier) {
        copy_async_commit();
        if (pending == 2) {
            copy_async_wait<2>();
            tell(first);
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
            tell(first);
        if (pending > 1)
            tell(second);
        pending = 0;
    }

    // Waits for a place to copy to. Nothing is held back while it waits, so that nobody waits for each other.
    __device__ __forceinline__ void await(u32 barrier, u32 parity) {
        if (!__all_sync(EVERY_LANE, barrier_has_passed(barrier, parity))) {
            finish();
            barrier_wait(barrier, parity);
        }
    }
};

// Begins to copy ROWS rows of a head; rows from `rows` on become zero. `from` is the head's first element of the first.
template <int ROWS> __device__ __forceinline__ void copy_rows(u32 tile, const act *from, i64 stride, int rows) {
    const int row = threadIdx.x / ROW_COPIERS, chunk = threadIdx.x % ROW_COPIERS;
    const u32 to = tile + place_in_panels(ROWS, row, chunk);
    from += row * stride + chunk * 8;
#pragma unroll
    for (int pass = 0; pass < ROWS / ROWS_AT_ONCE; ++pass) {
        copy_async_16(to + pass * ROWS_AT_ONCE * 128, from, row + pass * ROWS_AT_ONCE < rows);
        from += ROWS_AT_ONCE * stride;
    }
}

// ── results, by the warps of the other two ───────────────────────────────────────────────────────

// Keeps the compiler from working out in advance, and keeping in registers, all that follows from an address.
__device__ __forceinline__ u32 made_here(u32 address) {
    asm volatile("" : "+r"(address));
    return address;
}

// Writes the 16 rows of this warp, times a factor for each half, through its place in `staging`. `to` is the head's
// first element of the warp's first row.
__device__ __forceinline__ void write_result(act *to, i64 stride, int rows, u32 staging, const float (&c)[HEAD / 2],
                                             float upper, float lower) {
    const int warp = threadIdx.x / WARP - 4;
    staging = made_here(staging);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < HEAD / 8; ++n) {
        const float part[4] = {c[n * 4], c[n * 4 + 1], c[n * 4 + 2], c[n * 4 + 3]};
        put_fragment(staging, warp * 16, n, part, upper, lower);
    }
    __syncwarp();
    if (rows > 0)
        store_rows(to, stride, staging, warp * 16, min(rows, 16), 0, CHUNKS, HEAD);
}

// Columns 16 · step.. of a result, rounded, as the left side of another product.
template <int N> __device__ __forceinline__ void round_left(u32 (&a)[4], const float (&c)[N], int step) {
    a[0] = pack_two<act>(c[8 * step], c[8 * step + 1]);
    a[1] = pack_two<act>(c[8 * step + 2], c[8 * step + 3]);
    a[2] = pack_two<act>(c[8 * step + 4], c[8 * step + 5]);
    a[3] = pack_two<act>(c[8 * step + 6], c[8 * step + 7]);
}
