//! The checks of other machines: without a GPU, without a driver, with missing libraries, with little memory.

use super::*;
use crate::console::colour::plain;
use crate::console::wrap::fold;
use crate::report::doctor_table::render_table;
use expect_test::{Expect, expect};

fn facts(capability: (u32, u32), free_gib: u64) -> GpuFacts {
    GpuFacts {
        ordinal: 0,
        name: "NVIDIA Example".into(),
        capability,
        total_bytes: 24 << 30,
        free_bytes: Some(free_gib << 30),
        driver_version: 13_010,
    }
}

fn library(what: &'static str, is_there: bool) -> Library {
    let found = is_there.then(|| PathBuf::from("lib.so"));
    Library { what, file: "lib.so", found, remedy: "install it" }
}

fn readings(gpu: Result<GpuFacts, &str>, libraries: [bool; 3]) -> GpuReadings {
    let names = ["driver", "NVRTC", "cuBLASLt"];
    GpuReadings {
        gpu: gpu.map_err(str::to_owned),
        libraries: names.into_iter().zip(libraries).map(|(what, is_there)| library(what, is_there)).collect(),
        compiler: None,
        release: None,
        held: vec![],
        locked: Some(LockedLimit::Bytes(8 << 20)),
        is_wsl: false,
    }
}

/// The lines of a machine as they are printed.
fn check(readings: &GpuReadings, is_wanted: bool, expected: Expect) {
    expected.assert_eq(&plain(&fold(&render_table(&gpu_lines(readings, is_wanted)), 80)));
}

#[test]
fn no_gpu_and_no_driver_is_a_processor() {
    let nothing = readings(Err("the driver (libcuda.so) was not found"), [false; 3]);
    check(
        &nothing,
        false,
        expect![[r#"
              pass  locked memory  8.00 MiB per process; memory pinned by the GPU driver
                                   does not count
              pass  gpu            none: runs use the CPU
              pass  libraries      no NVIDIA libraries; the CPU needs none
            3 checks: 3 passed, 0 warnings, 0 failed
        "#]],
    );
    // A GPU that was asked for is required.
    check(
        &nothing,
        true,
        expect![[r#"
              pass  locked memory  8.00 MiB per process; memory pinned by the GPU driver
                                   does not count
              fail  gpu            the driver (libcuda.so) was not found
                                   remedy: `memory.device = "cpu"` trains without a GPU
              fail  libraries      no NVIDIA libraries; missing: driver, NVRTC, cuBLASLt
                                   remedy: install it
                                   remedy: install it
                                   remedy: install it
            3 checks: 1 passed, 0 warnings, 2 failed
        "#]],
    );
}

#[test]
fn half_an_install_names_the_other_half() {
    check(
        &readings(Err("NVRTC (libnvrtc.so) was not found"), [true, false, true]),
        false,
        expect![[r#"
              pass  locked memory  8.00 MiB per process; memory pinned by the GPU driver
                                   does not count
              warn  gpu            NVRTC (libnvrtc.so) was not found
                                   remedy: runs use the CPU until the GPU works
              warn  libraries      driver (lib.so), cuBLASLt (lib.so); missing: NVRTC
                                   remedy: install it
            3 checks: 1 passed, 2 warnings, 0 failed
        "#]],
    );
    // Every library, and a driver that finds no device.
    check(
        &readings(Err("`cuInit` failed: CUDA_ERROR_NO_DEVICE"), [true; 3]),
        false,
        expect![[r#"
              pass  locked memory  8.00 MiB per process; memory pinned by the GPU driver
                                   does not count
              warn  gpu            `cuInit` failed: CUDA_ERROR_NO_DEVICE
                                   remedy: runs use the CPU until the GPU works
              pass  libraries      driver (lib.so), NVRTC (lib.so), cuBLASLt (lib.so)
            3 checks: 2 passed, 1 warning, 0 failed
        "#]],
    );
}

#[test]
fn a_gpu_says_what_it_is_and_who_holds_it() {
    let mut whole = readings(Ok(facts((8, 9), 24)), [true; 3]);
    (whole.release, whole.locked) = (Some("570.86.15".into()), Some(LockedLimit::Unlimited));
    check(
        &whole,
        true,
        expect![[r#"
              pass  locked memory  no limit
              pass  gpu            NVIDIA Example, compute capability 8.9, driver 570.86.15
                                   for CUDA 13.1, bf16
              pass  libraries      driver (lib.so), NVRTC (lib.so), cuBLASLt (lib.so)
              pass  gpu memory     24.00 GiB free of 24.00 GiB
            4 checks: 4 passed, 0 warnings, 0 failed
        "#]],
    );
    let mut busy = readings(Ok(facts((6, 1), 20)), [true; 3]);
    busy.held = vec![
        GpuProcess { process: u32::MAX, bytes: Some(4 << 30) },
        GpuProcess { process: u32::MAX, bytes: None },
    ];
    busy.is_wsl = true;
    check(
        &busy,
        false,
        expect![[r#"
              warn  locked memory  WSL limits how much memory the GPU driver can pin
                                   remedy: if a run cannot pin its memory, set a smaller
                                     `memory.host_budget`
              warn  gpu            NVIDIA Example, compute capability 6.1, driver for CUDA
                                   13.1: training needs 7.0
                                   remedy: runs use the CPU; training on a GPU needs Volta
                                     (2017) or newer
              pass  libraries      driver (lib.so), NVRTC (lib.so), cuBLASLt (lib.so)
              warn  gpu memory     20.00 GiB free of 24.00 GiB, used by process 4294967295
                                   4.00 GiB, process 4294967295
                                   remedy: stop those processes, or plan with what is free
            4 checks: 1 passed, 3 warnings, 0 failed
        "#]],
    );
}

/// Verdict, end of the finding, and remedy, on a driver for CUDA 13.1.
#[test]
fn a_gpu_says_what_it_computes_in_and_whether_nvrtc_knows_it() {
    let of = |capability, compiler: Option<(i32, &[(u32, u32)])>| {
        let mut readings = readings(Ok(facts(capability, 24)), [true; 3]);
        readings.compiler =
            compiler.map(|(major, known)| Compiler { version: (major, 0), capabilities: known.to_vec() });
        let line = gpu_line(&readings, true);
        let end = line.finding.split_once("13.1, ").unwrap().1.to_owned();
        (line.verdict, end, line.remedies.join(" "))
    };
    let known: [(u32, u32); 3] = [(7, 5), (8, 0), (9, 0)];
    assert_eq!(of((9, 0), Some((13, &known))), (Verdict::Pass, "bf16".into(), String::new()));
    assert_eq!(of((7, 5), Some((13, &known))).1, "f16 (bf16 needs 8.0)");
    let (verdict, finding, remedy) = of((7, 0), Some((13, &known)));
    assert_eq!(verdict, Verdict::Warn);
    assert!(finding.ends_with("NVRTC 13.0 does not compile for it"), "{finding}");
    assert!(remedy.contains("nvidia-cuda-nvrtc-cu12"), "{remedy}");
    assert_eq!(of((7, 0), Some((12, &[(7, 0), (7, 5)]))).0, Verdict::Pass);
    let (verdict, finding, remedy) = of((9, 0), Some((14, &known)));
    assert_eq!(verdict, Verdict::Warn);
    assert!(finding.ends_with("NVRTC 14.0 is newer than the driver"), "{finding}");
    assert!(remedy.contains("nvidia-cuda-nvrtc==13.*"), "{remedy}");
}

#[test]
fn memory_of_a_gpu_is_free_unknown_or_held_by_others() {
    let line = |free| gpu_memory_line(&GpuFacts { free_bytes: free, ..facts((8, 9), 0) }, &[]);
    assert_eq!(line(Some(23 << 30)).verdict, Verdict::Pass);
    let taken = line(Some(10 << 30));
    let words = "10.00 GiB free of 24.00 GiB, used by processes outside this container";
    assert_eq!((taken.verdict, &*taken.finding), (Verdict::Warn, words));
    assert_eq!(line(None).verdict, Verdict::Warn);
    let own = GpuProcess { process: std::process::id(), bytes: Some(1 << 30) };
    let named = gpu_memory_line(&facts((8, 9), 23), &[own]);
    assert_eq!(named.facts["held_by"][0]["bytes"], 1 << 30);
    assert_eq!(
        named.finding.contains(" ("),
        Path::new("/proc/self/comm").exists(),
        "a program is named where it can be: {named:?}"
    );
}

#[test]
fn memory_is_little_below_a_gibibyte_and_its_holders_are_named() {
    let of = |process, name: &str, mib: u64| Resident { process, name: name.into(), bytes: mib << 20 };
    let holders = [of(812, "python3", 5 << 10), of(9, "browser", 700), of(1, "init", 12)];
    let line = |free| memory_line(Some(free), Some(8 << 30), &holders);
    let fine = line(1 << 30);
    let words = "1.00 GiB free of 8.00 GiB, most used by process 812 (python3) 5.00 GiB, process 9 (browser) 700.00 MiB";
    assert_eq!((fine.verdict, &*fine.finding), (Verdict::Pass, words));
    assert_eq!(fine.facts["held_by"][0], json!({"process": 812, "name": "python3", "bytes": 5u64 << 30}));
    assert_eq!(line((1 << 30) - 1).verdict, Verdict::Warn);
    assert_eq!(memory_line(Some(1 << 30), Some(8 << 30), &[]).finding, "1.00 GiB free of 8.00 GiB");
    assert_eq!(memory_line(None, None, &holders).verdict, Verdict::Warn);
}

#[test]
fn a_disk_without_room_is_warned_of() {
    let disk = |free| disk_line(Path::new("runs"), free);
    assert_eq!(
        [disk(Some(2 << 30)), disk(Some(5)), disk(None)].map(|line| line.verdict),
        [Verdict::Pass, Verdict::Warn, Verdict::Warn]
    );
    let full = disk(Some(0));
    assert_eq!((&*full.finding, &full.facts["free_bytes"]), ("0 B free in `runs`", &json!(0)));
    assert!(full.remedies[0].contains("`output.dir`"));
}

#[test]
fn threads_beyond_processors_are_warned_of() {
    let line = |threads| processor_line("Some Processor", threads, 4, "no bf16");
    assert_eq!(line(4).verdict, Verdict::Pass);
    let many = line(16);
    let words = "Some Processor, 16 threads on 4 cores, no bf16";
    assert_eq!((many.verdict, &*many.finding), (Verdict::Warn, words));
    assert!(many.remedies[0].contains("`memory.threads = 4`"));
}

#[test]
fn rates_have_units_for_people() {
    assert_eq!([95.4e9, 660e12].map(|per_s| rate(per_s, 0, "FLOP/s")), ["95 GFLOP/s", "660 TFLOP/s"]);
    assert_eq!([0.84e9, 3.6e12].map(|per_s| rate(per_s, 1, "B/s")), ["0.8 GB/s", "3.6 TB/s"]);
}
