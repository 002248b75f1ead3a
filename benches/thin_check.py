"""Checks the kernels for thin matmuls of the CUDA device against PyTorch in f64, and times them.

    python benches/thin_check.py                  # check and time
    python benches/thin_check.py check [bf16|f16]
    python benches/thin_check.py time
    python benches/thin_check.py sweep            # other splits of an adapter's gradients, for tuning

Needs a GPU, PyTorch and CuPy, and of the crates only `kernels/`. Launch geometry and scratch are those of
`cuda/thin.rs` and `workspace_cuda.rs`. A row of the check is one shape: relative errors (root mean square) of the
results, whether anything else was written, and whether a second run with poisoned scratch gave the
same bytes. Times are medians over events on one stream, both launches included, of operands that are in no cache
(several copies in turn); next to them are the time to read the wide matrix at 4.2 TB/s and PyTorch's time for the same results.
"""

import ctypes
import pathlib
import sys
import tempfile

import cupy
import torch

KERNELS = pathlib.Path(__file__).resolve().parent.parent / "crates/smidgen-runtime/kernels"
DEFINES = {torch.bfloat16: "-DACT_BF16", torch.float16: "-DACT_F16"}
SCRATCH_BYTES = 32 << 20
TILE_BYTES = 16 << 10
BLOCKS = 264
POISON = 12345.0


def compiler():
    """NVRTC, from PyTorch's packages or a toolkit."""
    folders = [pathlib.Path(torch.__file__).resolve().parent.parent / "nvidia", pathlib.Path("/usr/local/cuda")]
    for folder in folders:
        for path in sorted(folder.rglob("libnvrtc.so.*")):
            if "alt" not in path.name:
                return ctypes.CDLL(str(path))
    return ctypes.CDLL("libnvrtc.so")


def compile_file(source, dtype):
    """Machine code, with the options that the device uses."""
    nvrtc, program = compiler(), ctypes.c_void_p()
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}", "-default-device", "--std=c++17", DEFINES[dtype]]
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"thin.cu", 0, None, None)
    code = nvrtc.nvrtcCompileProgram(program, len(options), words)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if code:
        sys.exit(log.value.decode())
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin.raw)
    return cupy.RawModule(path=file.name)


def ceil(a, b):
    return -(-a // b)


def multiple(a, b):
    return ceil(a, b) * b


def padded(rank):
    return 16 if rank <= 16 else 32 if rank <= 32 else 64


def stages(rank):
    return 4 if padded(rank) == 16 else 3


# ── how work is cut: `workspace_cuda.rs` ─────────────────────────────────────────────────────────


def range_tokens(tokens, wanted, most):
    ranges = max(min(wanted, most, 64), 1)
    return max(multiple(ceil(tokens, ranges), 32), 64)


def adapter_cut(tokens, columns, rank, width=None, blocks=None):
    """Columns of a block, tokens of a launch and of a range."""
    elements = tokens * columns
    width = width or (512 if columns >= 1024 and elements >= 1 << 24 else 256)
    if blocks is None:
        blocks = BLOCKS // 2 if width == 512 and (rank > 16 or elements < 1 << 25) else BLOCKS
    across = ceil(columns, width)
    token_bytes = across * rank * 4
    most = SCRATCH_BYTES // 4 * 3 // token_bytes // 32 * 32
    launch = multiple(max(ceil(tokens, max(ceil(tokens, most), 1)), 1), 32)
    left = SCRATCH_BYTES - multiple(launch * token_bytes, 256)
    return width, launch, range_tokens(launch, blocks // across, left // (columns * rank * 4))


def sum_cut(tokens, columns, rank):
    return range_tokens(tokens, BLOCKS // ceil(columns, 256), SCRATCH_BYTES // (columns * rank * 4))


def matmul_cut(tokens, columns, rank):
    """Tokens of a block, columns of a range."""
    block, tile = (64, 128) if padded(rank) <= 32 else (128, 64)
    ranges = max(BLOCKS // max(ceil(tokens, block), 1), 1)
    return block, max(multiple(ceil(columns, ranges), tile), 128, 8 * padded(rank))


# ── launches: `cuda/thin.rs` ─────────────────────────────────────────────────────────────────────


class Kernels:
    modules, functions = {}, {}

    def __init__(self, dtype):
        if dtype not in Kernels.modules:
            files = ["prelude.cuh", "matrix_unit.cuh", "thin.cu"]
            Kernels.modules[dtype] = compile_file("".join((KERNELS / file).read_text() for file in files), dtype)
        self.dtype = dtype
        self.scratch = torch.empty(SCRATCH_BYTES // 4, device="cuda")

    def launch(self, name, grid, threads, shared, *args):
        key = (self.dtype, name)
        if key not in Kernels.functions:
            Kernels.functions[key] = Kernels.modules[self.dtype].get_function(name)
        function = Kernels.functions[key]
        if shared > 48 << 10:
            function.max_dynamic_shared_size_bytes = shared
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            function(grid, (threads,), args, shared_mem=shared)

    def total(self, sums=None, matmuls=None):
        """`sums`: address, parts, rows, width, gradient, scale; `matmuls`: address, parts, rows, width, output."""
        first, count, rows, width, gradient, scale = sums or (0, 0, 0, 4, None, 0.0)
        blocks = ceil(rows * width // 4, 64)
        args = [cupy.uint64(first), cupy.int32(count), cupy.int64(rows * width), cupy.int32(rows), cupy.int32(width),
                *place(gradient), cupy.float32(scale), cupy.int32(blocks)]
        first, count, rows, width, output = matmuls or (0, 0, 0, 4, None)
        args += [cupy.uint64(first), cupy.int32(count), cupy.int64(rows * width), cupy.int32(rows), cupy.int32(width),
                 *place(output)]
        self.launch("thin_total", (blocks + ceil(rows * width // 4, 64), 1), 256, 0, *args)

    def adapter_grad(self, dy, h, b, dh, db, scale, planned, width=None, blocks=None):
        (rows, columns), rank = dy.shape, h.shape[1]
        if rank > 32:
            self.matmul(dy, b, False, dh, planned)
            return self.outer_sum(dy, h, db, scale, planned)
        width, launch, tokens = adapter_cut(planned, columns, rank, width, blocks)
        across, partial = ceil(columns, width), ceil(launch, tokens) > 1
        matmuls = self.scratch.data_ptr()
        sums = matmuls + multiple(across * launch * rank * 4, 256)
        size, tile = padded(rank), TILE_BYTES // 2 // width
        shared = 2 * (width // 64) * tile * size * 4 + stages(rank) * (TILE_BYTES + tile * size * 2)
        for first in range(0, rows, launch):
            part = slice(first, min(first + launch, rows))
            count = part.stop - part.start
            ranges = ceil(count, tokens)
            target = (cupy.uint64(sums), cupy.int64(columns * rank), cupy.int64(rank)) if partial else (
                cupy.uint64(db.data_ptr()), cupy.int64(columns * rank), cupy.int64(db.stride(0)))
            self.launch(f"adapter_grad_{width}_{size}", (across, ranges), width // 2, shared,
                        *place(dy[part]), *place(h[part]), *place(b), cupy.int32(count), cupy.int32(columns),
                        cupy.int32(rank), cupy.int32(tokens), cupy.uint64(matmuls), *target,
                        cupy.int32(not partial), cupy.float32(scale))
            self.total((sums, ranges, columns, rank, db, scale) if partial else None,
                       (matmuls, across, count, rank, dh[part]))

    def outer_sum(self, left, right, gradient, scale, planned):
        rows, width = gradient.shape
        wide, thin = (right, left) if rows <= width else (left, right)
        columns, rank = max(rows, width), min(rows, width)
        if wide.shape[0] == 0:
            return
        tokens = sum_cut(planned, columns, rank)
        partial, ranges = ceil(planned, tokens) > 1, ceil(wide.shape[0], tokens)
        size = padded(rank)
        target = (cupy.uint64(self.scratch.data_ptr()), cupy.int64(columns * rank), cupy.int64(width)) if partial else (
            cupy.uint64(gradient.data_ptr()), cupy.int64(columns * rank), cupy.int64(gradient.stride(0)))
        self.launch(f"thin_sums_{size}", (ceil(columns, 256), ranges), 128,
                    stages(rank) * (TILE_BYTES + 32 * size * 2), *place(wide), *place(thin),
                    cupy.int32(wide.shape[0]), cupy.int32(columns), cupy.int32(rank), cupy.int32(tokens), *target,
                    cupy.int32(rows <= width), cupy.int32(not partial), cupy.float32(scale))
        if partial:
            self.total((self.scratch.data_ptr(), ranges, rows, width, gradient, scale))

    def matmul(self, wide, thin, of_rows, output, planned):
        (rows, columns), rank = wide.shape, output.shape[1]
        if rows == 0:
            return
        block, range_columns = matmul_cut(planned, columns, rank)
        ranges, size = ceil(columns, range_columns), padded(rank)
        parts = self.scratch.data_ptr() if ranges > 1 else 0
        self.launch(f"thin_matmul_of_{'rows' if of_rows else 'columns'}_{size}", (ranges, ceil(rows, block)), 128,
                    stages(rank) * (TILE_BYTES + TILE_BYTES // 2 // block * size * 2), *place(wide), *place(thin),
                    cupy.int32(rows), cupy.int32(columns), cupy.int32(rank), cupy.int32(range_columns),
                    cupy.uint64(parts), *place(output))
        if ranges > 1:
            self.total(None, (parts, ranges, rows, rank, output))


def place(matrix):
    """Address and row stride."""
    if matrix is None:
        return cupy.uint64(0), cupy.int64(0)
    return cupy.uint64(matrix.data_ptr()), cupy.int64(matrix.stride(0))


# ── checks ───────────────────────────────────────────────────────────────────────────────────────


def random(generator, rows, columns, spare, dtype):
    """A matrix next to columns of NaN."""
    whole = torch.full((rows, columns + spare), float("nan"), device="cuda", dtype=dtype)
    whole[:, :columns] = torch.randn(rows, columns, device="cuda", generator=generator).to(dtype)
    return whole[:, :columns]


def error(got, want):
    difference = (got.double() - want).norm() / (want.norm() + 1e-30)
    return difference.item() if difference == difference else float("inf")


def check_shape(dtype, kind, rows, planned, columns, rank, spare, of_rows=True):
    kernels = Kernels(dtype)
    generator = torch.Generator(device="cuda").manual_seed(rows + columns + rank)
    make = lambda r, c: random(generator, r, c, spare, dtype)
    scale = 0.75
    wide, thin = make(rows, columns), make(rows, rank)
    side = make(rank, columns) if of_rows and kind == "matmul" else make(columns, rank)
    gradient_shape = (rank, columns) if kind == "sum" and of_rows else (columns, rank)
    before = torch.randn(*gradient_shape, device="cuda", generator=generator)
    runs = []
    for poison in (float("nan"), 1e30):
        kernels.scratch.fill_(poison)
        output = torch.full((rows + 1, rank + spare), POISON, device="cuda", dtype=dtype)
        gradient = torch.full((gradient_shape[0] + 1, gradient_shape[1] + spare), POISON, device="cuda")
        result, sums = output[:rows, :rank], gradient[:-1, : gradient_shape[1]]
        sums.copy_(before)
        if kind == "gradient":
            kernels.adapter_grad(wide, thin, side, result, sums, scale, planned)
        elif kind == "sum":
            left, right = (thin, wide) if of_rows else (wide, thin)
            kernels.outer_sum(left, right, sums, scale, planned)
        else:
            kernels.matmul(wide, side, of_rows, result, planned)
        torch.cuda.synchronize()
        runs.append((output, gradient))
    same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*runs))
    spared = lambda whole, r, c: bool((whole[r:] == POISON).all()) and bool((whole[:, c:] == POISON).all())
    poison = torch.tensor(POISON).to(dtype).item()
    alone = bool((output[rows:] == poison).all()) and bool((output[:, rank:] == poison).all())
    alone = alone and spared(gradient, gradient_shape[0], gradient_shape[1])
    errors = {}
    if kind != "sum" and rows:
        errors["matmul"] = error(result, wide.double() @ (side.double().T if kind == "matmul" and of_rows else side.double()))
    if kind != "matmul":
        total = thin.double().T @ wide.double() if kind == "sum" and of_rows else wide.double().T @ thin.double()
        errors["sums"] = error(sums, before.double() + scale * total)
    # The matrix unit cuts sums off where it does not round them.
    limits = {"matmul": {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype], "sums": 3e-5}
    good = same and alone and all(e < limits[name] for name, e in errors.items())
    text = " ".join(f"{name} {e:.1e}" for name, e in errors.items())
    print(f"{'ok  ' if good else 'FAIL'} {str(dtype)[6:]:9} {kind:9} T={rows} of {planned} N={columns} R={rank} spare={spare} "
          f"{'rows' if of_rows else 'columns'}: {text} same={same} alone={alone}", flush=True)
    return not good


def check(dtypes):
    failures = 0
    sizes = [(2048, 2048, 3584), (1999, 2048, 3584), (1, 2048, 512), (33, 4096, 1536), (8192, 8192, 3584),
             (8191, 8192, 8960), (5000, 8192, 18944), (300, 300, 264), (64, 64, 8), (129, 1000, 40), (0, 2048, 512),
             (20000, 20000, 4096), (100, 100, 65536)]
    for dtype in dtypes:
        for rows, planned, columns in sizes:
            for rank in (8, 16, 24, 32, 64) if columns != 65536 else (16, 64):
                if rank > columns:
                    continue
                spare = 0 if rank in (16, 64) else 8
                failures += check_shape(dtype, "gradient", rows, planned, columns, rank, spare)
                for of_rows in (True, False):
                    # A square gradient has its thin side on the left.
                    if of_rows or rank != columns:
                        failures += check_shape(dtype, "sum", rows, planned, columns, rank, spare, of_rows)
                    failures += check_shape(dtype, "matmul", rows, planned, columns, rank, spare, of_rows)
    print(f"{failures} failures")
    return failures


# ── times ────────────────────────────────────────────────────────────────────────────────────────


def median_us(function, copies, rounds=16, together=8):
    """Of one call, where several follow each other."""
    for index in range(4):
        function(index % copies)
    events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(rounds)]
    # The GPU waits while the launches are queued, so that their cost on the host is not timed.
    torch.cuda._sleep(60_000_000)
    for index, (start, stop) in enumerate(events):
        start.record()
        for call in range(together):
            function((index * together + call) % copies)
        stop.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in events)[rounds // 2] * 1000 / together


class Operands:
    def __init__(self, tokens, columns, rank, dtype=torch.bfloat16):
        # As many wide matrices as make the cache forget the first.
        self.copies = min(max(ceil(160 << 20, tokens * columns * 2), 2), 24)
        make = lambda rows, width: torch.randn(rows, width, device="cuda").to(dtype)
        self.wide = [make(tokens, columns) for _ in range(self.copies)]
        self.h, self.a, self.b = make(tokens, rank), make(rank, columns), make(columns, rank)
        self.output = make(tokens, rank)
        self.da, self.db = torch.zeros(rank, columns, device="cuda"), torch.zeros(columns, rank, device="cuda")


def time_all():
    kernels = Kernels(torch.bfloat16)
    empty = median_us(lambda i: kernels.scratch[:4].zero_(), 1)
    print(f"us of a call among calls; one small launch {empty:.1f}")
    for tokens in (2048, 8192):
        for columns in (512, 1536, 3584, 8960, 18944):
            for rank in (8, 16, 32, 64):
                o = Operands(tokens, columns, rank)
                read = tokens * columns * 2 / 4.2e6
                ours = [
                    median_us(lambda i: kernels.matmul(o.wide[i], o.a, True, o.output, tokens), o.copies),
                    median_us(lambda i: kernels.adapter_grad(o.wide[i], o.h, o.b, o.output, o.db, 1.0, tokens), o.copies),
                    median_us(lambda i: kernels.outer_sum(o.h, o.wide[i], o.da, 1.0, tokens), o.copies),
                    median_us(lambda i: kernels.outer_sum(o.wide[i], o.h, o.db, 1.0, tokens), o.copies),
                ]
                torchs = [
                    median_us(lambda i: torch.matmul(o.wide[i], o.a.T), o.copies),
                    median_us(lambda i: (torch.matmul(o.wide[i], o.b), torch.matmul(o.wide[i].T, o.h)), o.copies),
                    median_us(lambda i: torch.matmul(o.h.T, o.wide[i]), o.copies),
                    median_us(lambda i: torch.matmul(o.wide[i].T, o.h), o.copies),
                ]
                names = ("matmul", "gradient", "sum dA", "sum dB")
                text = ", ".join(f"{n} {a:.1f} ({b:.1f})" for n, a, b in zip(names, ours, torchs))
                print(f"T={tokens} N={columns} R={rank}: read {read:.1f}; ours (PyTorch): {text}", flush=True)


def sweep():
    kernels = Kernels(torch.bfloat16)
    for tokens in (2048, 8192):
        for columns in (512, 3584, 18944):
            for rank in (16, 32):
                o = Operands(tokens, columns, rank)
                times = {}
                for width in (256, 512):
                    for blocks in (132, 198, 264, 396, 528):
                        run = lambda i: kernels.adapter_grad(o.wide[i], o.h, o.b, o.output, o.db, 1.0, tokens, width, blocks)
                        times[width, blocks] = median_us(run, o.copies)
                own = adapter_cut(tokens, columns, rank)
                text = " ".join(f"{w}/{b}:{us:.1f}" for (w, b), us in times.items())
                print(f"T={tokens} N={columns} R={rank} chosen {own}: {text}", flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    failures = 0
    if not words or words[0] == "check":
        names = {"bf16": torch.bfloat16, "f16": torch.float16}
        failures = check([names[word] for word in words[1:]] or list(names.values()))
    if not words or words[0] == "time":
        time_all()
    if words and words[0] == "sweep":
        sweep()
    sys.exit(1 if failures else 0)
