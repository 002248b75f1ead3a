//! What of the process is resident beside the reservation, which plans count too: freed heap goes back to the system, and
//! the program's own file is mapped as a whole.
//!
//! The GNU allocator keeps freed memory, by default the more the larger the blocks that were freed before, at the end of
//! every thread's arena, and of other threads nothing gets it back later. So its thresholds are set to what they begin
//! with, for all of the program's life. Planning is the exception: it makes and frees graphs in one thread.
//! Left out: other allocators, which are left as they are.

/// Sets the allocator so that freed memory goes back. For the start of a program.
pub fn give_back_when_freed() {
    set_thresholds(USUAL_BYTES, USUAL_BYTES);
}

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
        give_back_when_freed();
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

/// Maps every page of the program's own file: what of it is resident then follows neither from what was run so far nor
/// from the pieces in which the system happens to keep the file.
pub fn map_program() {
    #[cfg(target_os = "linux")]
    for (start, bytes) in program_ranges() {
        // SAFETY: the range is mapped and readable, and pages that are brought in keep their content. A system that does
        // not know the advice brings them in as they are needed.
        unsafe { libc::madvise(start as *mut libc::c_void, bytes, libc::MADV_POPULATE_READ) };
    }
}

/// Bytes of the program's own file that are mapped to be read; none where the system does not say.
pub fn program_file_bytes() -> usize {
    program_ranges().into_iter().map(|(_, bytes)| bytes).sum()
}

fn program_ranges() -> Vec<(usize, usize)> {
    let maps = std::fs::read_to_string("/proc/self/maps");
    let (Ok(maps), Ok(program)) = (maps, std::fs::read_link("/proc/self/exe")) else { return vec![] };
    maps.lines().filter_map(|line| program_range(line, program.to_str()?)).collect()
}

/// Start and length of a line of `/proc/self/maps`, if it is of the program's file.
fn program_range(line: &str, program: &str) -> Option<(usize, usize)> {
    // Range, permissions, offset, device and number of the file, then its path, which may have spaces.
    let mut path = line;
    for _ in 0..5 {
        path = path.trim_start().split_once(' ')?.1;
    }
    let (range, permissions) = line.split_once(' ')?;
    if !permissions.starts_with('r') || path.trim_start() != program {
        return None;
    }
    let (start, end) = range.split_once('-')?;
    let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16));
    let (start, end) = (start.ok()?, end.ok()?);
    Some((start, end.checked_sub(start)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_programs_file_are_found() {
        let line = "5586c2a00000-5586c2b00000 r-xp 00100000 fe:00 42                 /bin/smid gen";
        assert_eq!(program_range(line, "/bin/smid gen"), Some((0x5586_c2a0_0000, 1 << 20)));
        assert_eq!(program_range(line, "gen"), None);
        assert_eq!(program_range(line, "/bin/smidgen"), None);
        assert_eq!(program_range(&line.replace("r-xp", "---p"), "/bin/smid gen"), None);
        assert_eq!(program_range("nonsense", "/bin/smid gen"), None);
    }
}
