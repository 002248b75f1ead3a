"""Checks the attention kernels of the CUDA device against PyTorch in f64, and times them.

    python benches/attention_check.py                  # check and time
    python benches/attention_check.py check [bf16|f16|f32] [general]
    python benches/attention_check.py time [fa2] [general]
                                                       # fa2: also PyTorch's flash attention and cuDNN's

On a Hopper GPU the Hopper kernels are used wherever the device would use them; `general` uses the kernels for all GPUs.
Arguments that begin with -D go to the compiler.

Needs a GPU, PyTorch and CuPy, and of the crates only `kernels/`. Launch geometry and scratch are those of
`cuda/attention.rs`. A row of the check is one shape: relative errors of o, dq, dk and dv (root mean square), the
largest of lse, whether spare columns stayed untouched, and whether a second run into poisoned memory gave the same bytes.
Times are medians over events on one stream, list of tiles and preparation included; TFLOP/s count the visible
scores, 4 D forward and 10 D backward each.
"""

import ctypes
import math
import pathlib
import sys
import tempfile

import cupy
import torch

KERNELS = pathlib.Path(__file__).resolve().parent.parent / "crates/smidgen-runtime/kernels"
THREADS = 128
ALL_KEYS = 1 << 30
KEY_BLOCKS = 1024
HOPPER_THREADS = 384
HOPPER_SLOTS = 4
# Whether Hopper uses the kernels for all GPUs too, and whether an endless wait stops a kernel.
GENERAL = "general" in sys.argv
STOPPING = "time" not in sys.argv
DEFINES = {torch.bfloat16: "-DACT_BF16", torch.float16: "-DACT_F16", torch.float32: "-DACT_F32"}


def compiler():
    """NVRTC, from PyTorch's packages or a toolkit."""
    folders = [pathlib.Path(torch.__file__).resolve().parent.parent / "nvidia", pathlib.Path("/usr/local/cuda")]
    for folder in folders:
        for path in sorted(folder.rglob("libnvrtc.so.*")):
            if "alt" not in path.name:
                return ctypes.CDLL(str(path))
    return ctypes.CDLL("libnvrtc.so")


def compile_file(source, dtype, suffix=""):
    """Machine code, with the options that the device uses."""
    nvrtc, program = compiler(), ctypes.c_void_p()
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}{suffix}", "-default-device", "--std=c++17", DEFINES[dtype]]
    options += [word for word in sys.argv if word.startswith("-D")]
    if STOPPING:
        options.append("-DSPIN_LIMIT=4000000")
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"attention.cu", 0, None, None)
    code = nvrtc.nvrtcCompileProgram(program, len(options), words)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if code:
        sys.exit(log.value.decode())
    if b"Performance Loss" in log.value:
        print(log.value.decode().strip(), flush=True)
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin.raw)
    return cupy.RawModule(path=file.name)


class Kernels:
    modules = {}
    functions = {}

    def __init__(self, head_dim, dtype):
        self.padded = next(size for size in (64, 96, 128, 256) if head_dim <= size)
        self.dtype = dtype
        for name in ("attention", "attention_grad"):
            key = (self.padded, dtype, name)
            if key not in Kernels.modules:
                parts = ["prelude.cuh", "matrix_unit.cuh", "attention_tiles.cuh", name + ".cu"]
                texts = [(KERNELS / part).read_text() for part in parts]
                texts.insert(1, f"\n#define HEAD {self.padded}\n")
                Kernels.modules[key] = compile_file("".join(texts), dtype)
        # Hopper's kernels are padded to 64 or 128.
        self.wide = 64 if head_dim <= 64 else 128
        self.hopper = (not GENERAL and head_dim <= 128 and dtype != torch.float32
                       and torch.cuda.get_device_capability() == (9, 0))
        if self.hopper:
            for name in ("attention_hopper", "attention_hopper_grad"):
                key = (self.wide, dtype, name)
                if key not in Kernels.modules:
                    parts = ["prelude.cuh", "matrix_unit.cuh", "warpgroup_unit.cuh", "attention_tiles.cuh",
                             "attention_hopper.cuh", name + ".cu"]
                    texts = [(KERNELS / part).read_text() for part in parts]
                    texts.insert(1, f"\n#define HEAD {self.wide}\n")
                    Kernels.modules[key] = compile_file("".join(texts), dtype, "a")
        small = self.padded <= 128
        self.queries, self.keys = (128, 64) if small else (64, 32)
        row = 2 * self.padded
        self.forward_shared = row * (self.queries + 4 * (64 if small else 32))
        of_keys = row * 5 * self.keys + 4 * self.keys * self.keys + 16 * self.keys
        of_queries = row * (2 * self.queries + 4 * {64: 64, 96: 32, 128: 32, 256: 16}[self.padded])
        self.gradient_shared = max(of_keys, of_queries)
        self.block_sums = 4 * THREADS // {64: 8, 96: 16, 128: 16, 256: 32}[self.padded]

    def function(self, file, name, shared=0):
        size = self.wide if "hopper" in name else self.padded
        key = (size, self.dtype, name)
        if key not in Kernels.functions:
            function = Kernels.modules[(size, self.dtype, file)].get_function(f"{name}_{size}")
            if shared > 48 << 10:
                function.max_dynamic_shared_size_bytes = shared
            Kernels.functions[key] = function
        return Kernels.functions[key]

    def launch(self, file, name, grid, shared, *args, threads=THREADS):
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            self.function(file, name, shared)((grid,), (threads,), args, shared_mem=shared)

    def launch_hopper(self, file, name, items, tiles, more, *args):
        control = 16 + 16 * HOPPER_SLOTS + 64
        shared = 2 * self.wide * 128 * (tiles + HOPPER_SLOTS) + more + control
        grid = min(items, torch.cuda.get_device_properties(0).multi_processor_count)
        self.launch(file, name, grid, shared, *args, threads=HOPPER_THREADS)


def pointer(tensor):
    return cupy.uint64(tensor.data_ptr())


class Problem:
    def __init__(self, bounds, heads, kv_heads, head_dim, dtype, window=None, cap=None, spare=0, seed=0):
        self.bounds, self.heads, self.kv_heads, self.head_dim = bounds, heads, kv_heads, head_dim
        self.window, self.cap, self.dtype = window, cap, dtype
        self.scale = 1 / math.sqrt(head_dim)
        self.tokens, self.segments = bounds[-1], len(bounds) - 1
        self.kernels = Kernels(head_dim, dtype)
        self.spare = spare
        generator = torch.Generator(device="cuda").manual_seed(seed)

        def random(columns, spread):
            buffer = torch.randn(self.tokens, columns + spare, device="cuda", generator=generator) * spread
            return buffer.to(dtype)[:, :columns]

        wide, narrow = heads * head_dim, kv_heads * head_dim
        self.q, self.k, self.v = random(wide, 1.5), random(narrow, 1.5), random(narrow, 1.0)
        self.dout = random(wide, 1.0)
        self.boundaries = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        self.buffers = {name: torch.empty(self.tokens, columns + spare, dtype=dtype, device="cuda")
                        for name, columns in dict(o=wide, dq=wide, dk=narrow, dv=narrow).items()}
        self.columns = dict(o=wide, dq=wide, dk=narrow, dv=narrow)
        self.lse = torch.empty(self.tokens, heads, device="cuda")
        integers = lambda rows: torch.empty(4 * (1 + -(-self.tokens // rows) + self.segments), dtype=torch.int32, device="cuda")
        self.query_list, self.key_list = integers(self.kernels.queries), integers(self.kernels.keys)
        self.powers = torch.empty(heads, self.tokens, device="cuda")
        self.deltas = torch.empty(heads, self.tokens, device="cuda")
        operands = [self.q, self.k, self.v, self.dout, *self.buffers.values()]
        self.aligned = head_dim % 8 == 0 and all(
            x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in operands)
        self.tiled = self.aligned and dtype != torch.float32
        self.hopper = self.kernels.hopper and self.tiled and not cap and (window or ALL_KEYS) >= self.tokens
        self.key_rows = 128 if self.hopper else self.kernels.keys
        self.no_tiles = torch.zeros(4, dtype=torch.int32, device="cuda")
        blocks = -(-self.tokens // self.kernels.keys) * kv_heads
        self.parts = min(heads // kv_heads, -(-KEY_BLOCKS // blocks)) if self.tiled else 1
        self.parts_of_keys = torch.empty(self.parts if self.parts > 1 else 0, 2, self.tokens, narrow, dtype=dtype,
                                         device="cuda")

    def poison(self):
        for x in [*self.buffers.values(), self.lse, self.powers, self.deltas, self.parts_of_keys]:
            x.fill_(12345.0)
        self.query_list.fill_(-1)
        self.key_list.fill_(-1)

    def scores(self):
        return (cupy.int32(self.head_dim), cupy.int32(self.window or ALL_KEYS), cupy.float32(self.scale),
                cupy.float32(self.cap or 0.0))

    def operands(self, *tensors):
        return [x for tensor in tensors for x in (pointer(tensor), cupy.int64(tensor.stride(0)))]

    def bound(self, rows):
        return -(-self.tokens // rows) + self.segments

    def forward(self):
        kernels, name = self.kernels, "attention" if self.tiled else "attention_plain"
        kernels.launch("attention", "attention_tiles", 1, 0, pointer(self.boundaries),
               cupy.int32(self.segments), cupy.int32(self.tokens), pointer(self.query_list))
        if self.hopper:
            kernels.launch_hopper("attention_hopper", "attention_hopper", self.bound(kernels.queries) * self.heads, 2, 0,
                   *self.operands(self.q, self.k, self.v, self.buffers["o"]), pointer(self.lse),
                   pointer(self.query_list), cupy.int32(self.heads), cupy.int32(self.kv_heads), cupy.int32(self.head_dim),
                   cupy.float32(self.scale))
            return
        kernels.launch("attention", name, self.bound(kernels.queries) * self.heads,
               kernels.forward_shared if self.tiled else 0, *self.operands(self.q, self.k, self.v, self.buffers["o"]),
               pointer(self.lse), pointer(self.query_list), cupy.int32(self.heads), cupy.int32(self.kv_heads), *self.scores())

    def prepare(self):
        sums = -(-self.tokens * self.heads // self.kernels.block_sums)
        self.kernels.launch("attention_grad", "attention_grad_prepare", 2 + sums, 0,
               *self.operands(self.buffers["o"], self.dout), pointer(self.lse), pointer(self.boundaries),
               cupy.int32(self.segments), cupy.int32(self.tokens), cupy.int32(self.heads), cupy.int32(self.head_dim),
               cupy.int32(self.aligned), cupy.int32(self.key_rows), pointer(self.query_list), pointer(self.key_list), pointer(self.powers),
               pointer(self.deltas))

    def gradient(self, kinds="both"):
        kernels, name = self.kernels, "attention_grad" if self.tiled else "attention_grad_plain"
        key_blocks = self.bound(self.key_rows) * self.kv_heads * self.parts
        query_blocks = self.bound(kernels.queries) * self.heads
        grid = key_blocks + query_blocks
        if self.hopper:
            self.hopper_gradient(grid, kinds)
            return
        if kinds == "keys":
            grid = key_blocks
        if kinds == "queries":
            key_blocks, grid = 0, query_blocks
        kernels.launch("attention_grad", name, grid, kernels.gradient_shared if self.tiled else 0,
               *self.operands(self.q, self.k, self.v, self.dout, self.buffers["dq"], *self.key_gradients()),
               *(pointer(x) for x in (self.powers, self.deltas, self.query_list, self.key_list)),
               cupy.int32(key_blocks), cupy.int32(self.tokens), cupy.int32(self.heads), cupy.int32(self.kv_heads),
               cupy.int32(self.parts), cupy.int64(2 * self.tokens * self.columns["dk"]), *self.scores())
        if self.parts > 1 and kinds != "queries":
            self.sum_parts()

    def hopper_gradient(self, items, kinds):
        # The second number of the key list counts items: a launch without preparation starts over.
        query_list, key_list = self.query_list, self.key_list
        if kinds == "keys":
            query_list = self.no_tiles
            key_list[1].zero_()
        if kinds == "queries":
            key_list = self.no_tiles
            key_list.zero_()
        self.kernels.launch_hopper("attention_hopper_grad", "attention_grad_hopper", items, 3, HOPPER_SLOTS * 512,
               *self.operands(self.q, self.k, self.v, self.dout, self.buffers["dq"], *self.key_gradients()),
               *(pointer(x) for x in (self.powers, self.deltas, query_list, key_list)),
               cupy.int32(self.tokens), cupy.int32(self.heads), cupy.int32(self.kv_heads), cupy.int32(self.head_dim),
               cupy.int32(self.parts), cupy.int64(2 * self.tokens * self.columns["dk"]), cupy.float32(self.scale))
        if self.parts > 1 and kinds != "queries":
            self.sum_parts()

    def key_gradients(self):
        if self.parts > 1:
            return self.parts_of_keys[0, 0], self.parts_of_keys[0, 1]
        return self.buffers["dk"], self.buffers["dv"]

    def sum_parts(self):
        items = 2 * self.tokens * self.columns["dk"] // 8
        self.kernels.launch("attention_grad", "attention_grad_sum", -(-items // THREADS), 0, pointer(self.parts_of_keys),
               cupy.int32(self.parts), cupy.int32(self.tokens), cupy.int32(self.columns["dk"]),
               *self.operands(self.buffers["dk"], self.buffers["dv"]))

    def backward(self):
        self.prepare()
        self.gradient()

    def result(self, name):
        return self.buffers[name][:, : self.columns[name]]

    def visible(self):
        total = 0
        for begin, end in zip(self.bounds, self.bounds[1:]):
            n, w = end - begin, min(self.window or ALL_KEYS, end - begin)
            total += w * (w + 1) // 2 + (n - w) * w
        return total * self.heads

    def reference(self):
        """o, lse and the gradients in f64, one segment after the other."""
        shape = lambda x, heads: x.double().reshape(-1, heads, self.head_dim).transpose(0, 1)
        out = {name: torch.zeros(self.tokens, columns, dtype=torch.float64, device="cuda")
               for name, columns in self.columns.items()}
        lse = torch.zeros(self.tokens, self.heads, dtype=torch.float64, device="cuda")
        group = self.heads // self.kv_heads
        for begin, end in zip(self.bounds, self.bounds[1:]):
            if begin == end:
                continue
            q = shape(self.q[begin:end], self.heads).requires_grad_()
            k, v = (shape(x[begin:end], self.kv_heads).requires_grad_() for x in (self.k, self.v))
            s = q @ k.repeat_interleave(group, 0).transpose(1, 2) * self.scale
            if self.cap:
                s = self.cap * torch.tanh(s / self.cap)
            place = torch.arange(end - begin, device="cuda")
            distance = place[:, None] - place[None, :]
            s = s.masked_fill((distance < 0) | (distance >= (self.window or ALL_KEYS)), float("-inf"))
            lse[begin:end] = torch.logsumexp(s, 2).detach().T
            o = torch.softmax(s, 2) @ v.repeat_interleave(group, 0)
            o.backward(shape(self.dout[begin:end], self.heads))
            for name, x in dict(o=o.detach(), dq=q.grad, dk=k.grad, dv=v.grad).items():
                out[name][begin:end] = x.transpose(0, 1).reshape(end - begin, -1)
        return out, lse


def check(dtypes):
    ragged = [0, 1, 4, 4, 137, 140, 333, 700]
    shapes = [
        dict(bounds=[0, 300], heads=4, kv_heads=2, head_dim=128),
        dict(bounds=[0, 1], heads=2, kv_heads=1, head_dim=128),
        dict(bounds=ragged, heads=7, kv_heads=1, head_dim=128, spare=16),
        dict(bounds=ragged, heads=4, kv_heads=4, head_dim=64),
        dict(bounds=ragged, heads=4, kv_heads=2, head_dim=80, spare=8),
        dict(bounds=ragged, heads=6, kv_heads=2, head_dim=96),
        dict(bounds=ragged, heads=4, kv_heads=1, head_dim=256),
        dict(bounds=ragged, heads=3, kv_heads=3, head_dim=40),
        dict(bounds=ragged, heads=2, kv_heads=1, head_dim=160),
        dict(bounds=ragged, heads=2, kv_heads=1, head_dim=192),
        dict(bounds=ragged, heads=2, kv_heads=1, head_dim=61),
        dict(bounds=ragged, heads=4, kv_heads=2, head_dim=128, spare=3),
        dict(bounds=[0, 500, 1000], heads=4, kv_heads=2, head_dim=128, window=100),
        dict(bounds=[0, 500, 1000], heads=4, kv_heads=2, head_dim=64, window=1),
        dict(bounds=[0, 900], heads=4, kv_heads=2, head_dim=128, cap=2.0),
        dict(bounds=[0, 900], heads=8, kv_heads=4, head_dim=256, window=257, cap=5.0),
        dict(bounds=[0, 2048, 4096], heads=14, kv_heads=2, head_dim=64),
        dict(bounds=[0, 3000, 4096], heads=4, kv_heads=1, head_dim=128),
        dict(bounds=[0, 1500, 1500, 2911], heads=14, kv_heads=2, head_dim=128, spare=8),
        dict(bounds=[0, 2048], heads=28, kv_heads=4, head_dim=128),
        dict(bounds=list(range(0, 3001)), heads=2, kv_heads=1, head_dim=64),
        dict(bounds=[0, *range(7, 4000, 13)], heads=2, kv_heads=2, head_dim=128),
    ]
    failures = 0
    for dtype in dtypes:
        for shape in shapes:
            if dtype == torch.float32 and shape["bounds"][-1] > 2000 and len(shape["bounds"]) < 10:
                continue
            problem = Problem(dtype=dtype, **shape)
            want, want_lse = problem.reference()
            runs = []
            for _ in range(2):
                problem.poison()
                problem.forward()
                problem.backward()
                torch.cuda.synchronize()
                runs.append([x.clone() for x in [*problem.buffers.values(), problem.lse]])
            same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*runs))
            spare = all((x[:, problem.columns[name]:] == torch.tensor(12345.0).to(dtype).item()).all().item()
                        for name, x in problem.buffers.items())
            limit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 5e-6}[dtype]
            errors = {name: ((problem.result(name).double() - x).norm() / (x.norm() + 1e-30)).item()
                      for name, x in want.items()}
            # With one visible key, ds is only rounding error: the gradients of q and k are noise around zero.
            if all(b - a <= 1 for a, b in zip(shape["bounds"], shape["bounds"][1:])) or shape.get("window") == 1:
                for name in ("dq", "dk"):
                    errors[name] = problem.result(name).double().abs().max().item() * limit / 1e-3
            lse_error = (problem.lse.double() - want_lse).abs().max().item()
            good = same and spare and lse_error < 1e-4 and all(e < limit for e in errors.values())
            failures += not good
            text = " ".join(f"{name} {error:.1e}" for name, error in errors.items())
            brief = {k: v for k, v in shape.items() if k != "bounds"}
            print(f"{'ok  ' if good else 'FAIL'} {str(dtype)[6:]:9} T={problem.tokens:5} G={problem.segments:4} {brief} "
                  f"{'hopper' if problem.hopper else 'tiles' if problem.tiled else 'plain'} parts={problem.parts}: {text} lse {lse_error:.1e} same={same} spare={spare}", flush=True)
    print(f"{failures} failures")
    return failures


def median_ms(function, rounds=20):
    for _ in range(3):
        function()
    events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(rounds)]
    # The GPU waits while the launches are queued, so that their cost on the host is not timed.
    torch.cuda._sleep(40_000_000)
    for start, stop in events:
        start.record()
        function()
        stop.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in events)[rounds // 2]


def time_all(with_torch):
    eight = [0]
    for length in (2048, 1536, 1280, 1024, 896, 768, 384, 256):
        eight.append(eight[-1] + length)
    lists = {"4 x 2048": [0, 2048, 4096, 6144, 8192], "1 x 8192": [0, 8192], "8 ragged": eight, "1 x 2048": [0, 2048]}
    shapes = [(28, 4, 128), (12, 2, 128), (32, 8, 64), (24, 8, 96), (8, 4, 256)]
    for heads, kv_heads, head_dim in shapes:
        for name, bounds in lists.items():
            problem = Problem(bounds, heads, kv_heads, head_dim, torch.bfloat16)
            problem.forward()
            problem.backward()
            work = problem.visible() * head_dim
            times = {
                "forward": (median_ms(problem.forward), 4),
                "backward": (median_ms(problem.backward), 10),
                "prepare": (median_ms(problem.prepare), 0),
                "of keys": (median_ms(lambda: problem.gradient("keys")), 8),
                "of queries": (median_ms(lambda: problem.gradient("queries")), 6),
            }
            text = ", ".join(f"{what} {ms:.3f} ms" + (f" {work * flops / ms / 1e9:.0f}" if flops else "")
                             for what, (ms, flops) in times.items())
            kernels = "hopper " if problem.hopper else ""
            print(f"{kernels}{heads}/{kv_heads} x {head_dim} {name}: {text}", flush=True)
            if with_torch and len({b - a for a, b in zip(bounds, bounds[1:])}) == 1:
                time_torch(problem, bounds[1], work)


def time_torch(problem, length, work):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch = problem.segments
    view = lambda x, heads: x.reshape(batch, length, heads, problem.head_dim).transpose(1, 2).detach().requires_grad_()
    q, dout = view(problem.q, problem.heads), view(problem.dout, problem.heads)
    group = problem.heads // problem.kv_heads
    k, v = (view(x, problem.kv_heads).repeat_interleave(group, 1).detach().requires_grad_() for x in (problem.k, problem.v))
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            run = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            forward = median_ms(run)
            o = run()
            backward = median_ms(lambda: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True))
        print(f"    {backend}: forward {forward:.3f} ms {work * 4 / forward / 1e9:.0f}, "
              f"backward {backward:.3f} ms {work * 10 / backward / 1e9:.0f}", flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    failures = 0
    words = [word for word in words if word != "general" and not word.startswith("-D")]
    if not words or words[0] == "check":
        names = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
        failures = check([names[word] for word in words[1:] if word in names] or list(names.values()))
    if not words or words[0] == "time":
        time_all("fa2" in words)
    sys.exit(1 if failures else 0)
