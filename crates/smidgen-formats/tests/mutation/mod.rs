//! Shared by tests of damaged files: random changes to bytes, and an allocator that counts memory.
//!
//! Memory is counted per thread, because tests run in parallel. `SMIDGEN_MUTATIONS` sets how many damaged
//! files a test tries; with the default a test takes a second or two.

// Each test binary needs only some of these functions.
#![allow(dead_code)]

pub mod json;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use proptest::prelude::*;

pub struct Counting;

thread_local! {
    static LIVE_BYTES: Cell<isize> = const { Cell::new(0) };
    static PEAK_BYTES: Cell<isize> = const { Cell::new(0) };
}

fn count(change_bytes: isize) {
    let live = LIVE_BYTES.get() + change_bytes;
    LIVE_BYTES.set(live);
    PEAK_BYTES.set(PEAK_BYTES.get().max(live));
}

// SAFETY: every call goes to the system allocator unchanged; the counters are constant-initialized cells
// without a destructor, so touching them neither allocates nor fails.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The result of `work`, and the peak of the memory that it allocated.
pub fn peak_bytes_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE_BYTES.get();
    PEAK_BYTES.set(before);
    let result = work();
    (result, (PEAK_BYTES.get() - before) as usize)
}

/// Paths, directory buffers and error texts.
const ALLOWED_FIXED_BYTES: usize = 128 << 10;
/// A JSON digit and its comma become a `serde_json::Value` of 32 bytes in a vector that doubles as it grows.
const ALLOWED_PER_FILE_BYTE: usize = 64;

pub fn allowed_bytes(file_bytes: usize) -> usize {
    ALLOWED_FIXED_BYTES + ALLOWED_PER_FILE_BYTE * file_bytes
}

/// As many cases as `SMIDGEN_MUTATIONS` says, or 512.
pub fn cases() -> ProptestConfig {
    let asked = std::env::var("SMIDGEN_MUTATIONS").ok();
    let cases = asked.map_or(512, |text| text.parse().expect("`SMIDGEN_MUTATIONS` is a number"));
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

#[derive(Clone, Debug)]
pub enum Mutation {
    Set(usize, u8),
    Insert(usize, u8),
    Remove(usize, usize),
    Truncate(usize),
    Double(usize, usize),
    /// Replaces the first number at or after an offset.
    Number(usize, &'static str),
    /// Overwrites eight bytes, such as a length prefix.
    Word(usize, u64),
}

pub fn mutation() -> impl Strategy<Value = Mutation> {
    let numbers = vec![
        "0",
        "1",
        "-1",
        "4294967296",
        "9223372036854775807",
        "18446744073709551615",
        "18446744073709551616",
        "1e300",
        "1.5",
        "null",
        "[]",
    ];
    let place = || any::<usize>();
    // Often characters of JSON, so that damaged text often stays valid.
    let byte = prop_oneof![any::<u8>(), proptest::sample::select(br#"{}[]",:0123456789 \"#.to_vec())];
    prop_oneof![
        (place(), byte.clone()).prop_map(|(at, byte)| Mutation::Set(at, byte)),
        (place(), byte).prop_map(|(at, byte)| Mutation::Insert(at, byte)),
        (place(), 1..20_usize).prop_map(|(at, length)| Mutation::Remove(at, length)),
        place().prop_map(Mutation::Truncate),
        (place(), 1..80_usize).prop_map(|(at, length)| Mutation::Double(at, length)),
        (place(), proptest::sample::select(numbers)).prop_map(|(at, text)| Mutation::Number(at, text)),
        (prop_oneof![Just(0), place()], any::<u64>()).prop_map(|(at, word)| Mutation::Word(at, word)),
        (Just(0), 0..200_000_000_u64).prop_map(|(at, word)| Mutation::Word(at, word)),
    ]
}

pub fn mutated(valid: &[u8], mutations: &[Mutation]) -> Vec<u8> {
    let mut bytes = valid.to_vec();
    for mutation in mutations {
        let length = bytes.len();
        let within = |at: usize| at % (length + 1);
        match *mutation {
            Mutation::Set(at, byte) => {
                if let Some(place) = bytes.get_mut(within(at)) {
                    *place = byte;
                }
            }
            Mutation::Insert(at, byte) => bytes.insert(within(at), byte),
            Mutation::Remove(at, count) => {
                bytes.drain(within(at)..(within(at) + count).min(length));
            }
            Mutation::Truncate(at) => bytes.truncate(within(at)),
            Mutation::Double(at, count) => {
                let copy = bytes[within(at)..(within(at) + count).min(length)].to_vec();
                bytes.splice(within(at)..within(at), copy);
            }
            Mutation::Number(at, text) => {
                let from = within(at);
                let digits = bytes[from..].iter().position(u8::is_ascii_digit);
                if let Some(begin) = digits.map(|position| from + position) {
                    let run = bytes[begin..].iter().take_while(|byte| byte.is_ascii_digit());
                    let end = begin + run.count();
                    bytes.splice(begin..end, text.bytes());
                }
            }
            Mutation::Word(at, word) => {
                let from = within(at);
                let end = (from + 8).min(length);
                bytes[from..end].copy_from_slice(&word.to_le_bytes()[..end - from]);
            }
        }
    }
    bytes
}
