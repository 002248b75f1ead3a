//! What of the process is resident beside the reservation, which plans count too: freed heap goes back to the system, and
//! the program's own files, itself and the libraries it is linked with, are mapped as a whole.
//!
//! The GNU allocator keeps freed memory, by default the more the larger the blocks that were freed before, at the end of
//! every thread's arena, and of other threads nothing gets it back later. So its thresholds are set to what they begin
//! with, for all of the program's life. Planning is the exception: it makes and frees graphs in one thread.
//! Left out: other allocators, which are left as they are.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Sets the allocator so that freed memory goes back, takes note of the program's own files, and wants no large pages: a
/// heap of them would be larger than what is in it. For the start of a program.
pub fn begin() {
    program_ranges();
    set_thresholds(USUAL_BYTES, USUAL_BYTES);
    if has_large_pages() {
        set_large_pages(false);
        ARE_OFF_BY_US.store(true, Ordering::Relaxed);
    }
}

/// Large pages are not ours to have where whoever started the program turned them off.
static ARE_OFF_BY_US: AtomicBool = AtomicBool::new(false);

/// Does what takes memory that large pages are good for.
pub fn with_large_pages<T>(work: impl FnOnce() -> T) -> T {
    if !ARE_OFF_BY_US.load(Ordering::Relaxed) {
        return work();
    }
    set_large_pages(true);
    let result = work();
    set_large_pages(false);
    result
}

/// Whether this process may have large pages where the system has them.
#[cfg(target_os = "linux")]
pub fn has_large_pages() -> bool {
    // SAFETY: only asks.
    unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) == 0 }
}

#[cfg(target_os = "linux")]
fn set_large_pages(are_wanted: bool) {
    // SAFETY: the setting changes how memory is taken, not what is in it; its refusal is left as it is.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, libc::c_ulong::from(!are_wanted), 0, 0, 0) };
}

#[cfg(not(target_os = "linux"))]
pub fn has_large_pages() -> bool {
    true
}

#[cfg(not(target_os = "linux"))]
fn set_large_pages(_: bool) {}

/// What the allocator begins with: larger blocks are mapped by themselves, and more at the end of an arena goes back.
const USUAL_BYTES: i32 = 128 << 10;
/// The largest block that the allocator would not map by itself, and the most that it may keep.
const LARGEST_BLOCK_BYTES: i32 = 32 << 20;
const MOST_KEPT_BYTES: i32 = 1 << 30;

/// While it lives, freed memory is kept for what this thread asks for next; then all of it goes back.
#[derive(Debug)]
pub struct Hoard(());

impl Hoard {
    pub fn begin() -> Hoard {
        set_thresholds(LARGEST_BLOCK_BYTES, MOST_KEPT_BYTES);
        Hoard(())
    }
}

impl Drop for Hoard {
    fn drop(&mut self) {
        set_thresholds(USUAL_BYTES, USUAL_BYTES);
        // What is free at the end of this thread's arena goes back when the next large block is freed.
        drop(std::hint::black_box(Vec::<u8>::with_capacity(USUAL_BYTES as usize * 3 / 4)));
        give_back();
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn set_thresholds(mapped_bytes: i32, kept_bytes: i32) {
    // SAFETY: both only set when memory is taken from the system and given back.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, mapped_bytes);
        libc::mallopt(libc::M_TRIM_THRESHOLD, kept_bytes);
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn set_thresholds(_: i32, _: i32) {}

/// Gives back what is free now.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: trimming touches no memory that is in use.
    unsafe {
        libc::malloc_trim(0)
    };
}

/// Maps every page of the program's own files: what of them is resident then follows neither from what was run so far nor
/// from where the system put them and in which pieces it keeps them.
pub fn map_program() {
    #[cfg(target_os = "linux")]
    for &(start, bytes) in program_ranges() {
        // SAFETY: the range is mapped and readable, and pages that are brought in keep their content. A system that does
        // not know the advice brings them in as they are needed.
        unsafe { libc::madvise(start as *mut libc::c_void, bytes, libc::MADV_POPULATE_READ) };
    }
}

/// Bytes of the program's own files that are mapped to be read; none where the system does not say.
pub fn program_files_bytes() -> usize {
    program_ranges().iter().map(|(_, bytes)| bytes).sum()
}

/// Start and length of what is mapped of the program and of the libraries that it began with. The first to ask should be
/// the start of the program: libraries that are loaded later, such as a driver's, are not its own.
fn program_ranges() -> &'static [(usize, usize)] {
    static RANGES: OnceLock<Vec<(usize, usize)>> = OnceLock::new();
    RANGES.get_or_init(|| code_ranges(&std::fs::read_to_string("/proc/self/maps").unwrap_or_default()))
}

/// The readable ranges of all files that code is run from, of the lines of `/proc/self/maps`.
fn code_ranges(maps: &str) -> Vec<(usize, usize)> {
    let files: Vec<MappedFile<'_>> = maps.lines().filter_map(MappedFile::parse).collect();
    let is_code = |path| files.iter().any(|file| file.path == path && file.permissions.contains('x'));
    let readable = files.iter().filter(|file| file.permissions.starts_with('r') && is_code(file.path));
    readable.map(|file| (file.start, file.bytes)).collect()
}

struct MappedFile<'a> {
    start: usize,
    bytes: usize,
    permissions: &'a str,
    path: &'a str,
}

impl MappedFile<'_> {
    /// Range, permissions, offset, device and number of the file, then its path, which may have spaces.
    fn parse(line: &str) -> Option<MappedFile<'_>> {
        let mut rest = line;
        let mut word = || {
            let (word, after) = rest.trim_start().split_once(' ')?;
            rest = after;
            Some(word)
        };
        let [range, permissions, ..] = [word()?, word()?, word()?, word()?, word()?];
        let path = rest.trim_start();
        let (start, end) = range.split_once('-')?;
        let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16));
        let (start, end) = (start.ok()?, end.ok()?);
        let bytes = end.checked_sub(start)?;
        path.starts_with('/').then_some(MappedFile { start, bytes, permissions, path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_with_code_are_the_programs_own() {
        let maps = "\
1000-3000 r--p 00000000 fe:00 42                         /bin/smid gen
3000-7000 r-xp 00002000 fe:00 42                         /bin/smid gen
7000-8000 ---p 00006000 fe:00 42                         /bin/smid gen
8000-9000 rw-p 00006000 fe:00 42                         /bin/smid gen
9000-a000 rw-p 00000000 00:00 0 
a000-b000 rw-p 00000000 00:00 0                          [heap]
b000-f000 r--p 00000000 fe:00 43                         /data/model.safetensors
f000-10000 r-xp 00000000 fe:00 44                        /lib/libm.so.6
10000-11000 r-xp 00000000 00:00 0                        [vdso]
nonsense
";
        let own = [(0x1000, 0x2000), (0x3000, 0x4000), (0x8000, 0x1000), (0xf000, 0x1000)];
        assert_eq!(code_ranges(maps), own);
    }
}
