//! What was freed goes back to the system, and the program's file is mapped: in a process of its own, because all of it
//! is measured, and in one test, because tests of a process run side by side.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

use smidgen_runtime::cpu::heap::{
    Hoard, begin, has_large_pages, map_program, program_files_bytes, with_large_pages,
};
use std::hint::black_box;

const MIB: usize = 1 << 20;
/// Below the size of what is mapped by itself: such blocks lie in the arena of their thread.
const BLOCK_BYTES: usize = 100 << 10;
const BLOCKS: usize = 160;

fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok());
    4096 * pages.expect("the second number")
}

fn take_and_free() {
    let blocks: Vec<Vec<u8>> = (0..BLOCKS).map(|_| black_box(vec![1u8; BLOCK_BYTES])).collect();
    drop(black_box(blocks));
}

/// Kibibytes of the files that code is run from that are mapped for reading, and those of them that are resident.
fn program_kib() -> (usize, usize) {
    let text = std::fs::read_to_string("/proc/self/smaps").expect("Linux has it");
    let number = |line: &str| line.split_whitespace().nth(1).and_then(|it| it.parse().ok()).unwrap_or(0);
    // The first line of a range has its permissions behind a blank, and a path from the root where it is of a file.
    let permissions = |line: &str| line.split(' ').nth(1).filter(|it| it.len() == 4).map(str::to_owned);
    let path = |line: &str| line.find('/').map(|start| line[start..].to_owned());
    let is_of_code = |line: &str| permissions(line).is_some_and(|it| it.contains('x'));
    let files: Vec<String> = text.lines().filter(|line| is_of_code(line)).filter_map(path).collect();
    let (mut is_counted, mut size, mut resident) = (false, 0, 0);
    for line in text.lines() {
        match line.split_once(':') {
            Some(("Size", _)) if is_counted => size += number(line),
            Some(("Rss", _)) if is_counted => resident += number(line),
            _ => {
                if let Some(permissions) = permissions(line) {
                    let is_of_program = path(line).is_some_and(|path| files.contains(&path));
                    is_counted = permissions.starts_with('r') && is_of_program;
                }
            }
        }
    }
    (size, resident)
}

#[test]
fn freed_memory_goes_back_and_the_program_is_there() {
    const THREADS: usize = 4;
    begin();
    assert!(!has_large_pages() && with_large_pages(has_large_pages) && !has_large_pages());
    let before = resident_bytes();
    let grown = || resident_bytes().saturating_sub(before);
    let barrier = std::sync::Barrier::new(THREADS);
    let work = || {
        // A large block that is freed makes an allocator keep more whose thresholds move.
        drop(black_box(vec![1u8; 24 * MIB]));
        barrier.wait();
        take_and_free();
        barrier.wait();
    };
    std::thread::scope(|scope| (0..THREADS).for_each(|_| drop(scope.spawn(work))));
    assert!(grown() < 4 * MIB, "{} bytes stayed", grown());

    let hoard = Hoard::begin();
    take_and_free();
    assert!(grown() > BLOCKS * BLOCK_BYTES / 2, "nothing was kept for the next");
    drop(hoard);
    assert!(grown() < 4 * MIB, "{} bytes stayed", grown());

    let (size, resident) = program_kib();
    assert!(size > 100 && resident < size, "{resident} of {size} KiB before");
    map_program();
    assert_eq!(program_kib(), (size, size));
    assert_eq!(program_files_bytes(), size << 10);
}
