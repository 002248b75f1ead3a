//! Runs the collectives of MPI with 1, 2, 3 and 4 real ranks.
//!
//! The test runs this test program again under `mpiexec`, with a filter for one test that otherwise does nothing. Without
//! an `mpiexec` the test says that it skipped; with `SMIDGEN_REQUIRE_MPI=1` that is a failure.

use super::mpi_places::{MPIEXEC_VARIABLE, find_mpiexec};
use super::{Comm, CommError, Mpi, Number, Span};
use std::ops::Range;
use std::process::Command;

/// Set for the ranks that the test starts: their expected number.
const RANKS_VARIABLE: &str = "SMIDGEN_TEST_RANKS";

#[test]
fn collectives_agree_with_plain_sums_on_real_ranks() {
    let mpiexec = match find_mpiexec() {
        Ok(mpiexec) => mpiexec,
        Err(error) if std::env::var_os("SMIDGEN_REQUIRE_MPI").is_some_and(|value| value == "1") => {
            panic!("{error}, but SMIDGEN_REQUIRE_MPI=1 is set")
        }
        Err(error) => return println!("skipped: collectives over MPI ({error})"),
    };
    for ranks in 1..=4 {
        let output = Command::new(&mpiexec.path)
            .args(["-n", &ranks.to_string()])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "comm::mpi_tests::as_one_of_the_ranks", "--nocapture"])
            .env(MPIEXEC_VARIABLE, &mpiexec.path)
            .env(RANKS_VARIABLE, ranks.to_string())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{ranks} ranks: {text}\n{errors}");
        assert_eq!(text.matches("all collectives agree").count(), ranks, "{text}");
    }
}

/// Runs as one rank of the test above; does nothing otherwise.
#[test]
fn as_one_of_the_ranks() {
    let Ok(ranks) = std::env::var(RANKS_VARIABLE) else { return };
    let mut world = Mpi::start_alone().unwrap();
    assert_eq!(world.size().to_string(), ranks);
    assert!(world.name().starts_with("MPI ("), "{}", world.name());
    assert!(matches!(Mpi::start_alone(), Err(CommError::Again)));

    // From empty spans to more than one round of the scratch memory; each length also on another thread.
    for length in [0, 1, 3, 1000, 4099, 1_100_003] {
        all_reduce(&mut world, length);
        world = std::thread::spawn(move || {
            reduce_scatter(&mut world, length);
            all_gather(&mut world, length);
            broadcast(&mut world, length);
            world
        })
        .join()
        .unwrap();
    }
    many_spans(&mut world);
    world.barrier().unwrap();
    let root = world.size() - 1;
    let received = world.broadcast_bytes(format!("from rank {}", world.rank()).into_bytes(), root).unwrap();
    assert_eq!(received, format!("from rank {root}").into_bytes());
    println!("rank {} of {}: all collectives agree", world.rank(), world.size());
    // An error is returned with MPI's text and sets `failed`, which would skip `MPI_Finalize`. Intel MPI 2021.19 ends
    // the process instead, with the same text.
    if world.name().contains("MPICH") {
        // SAFETY: memory of this function.
        let wrong = unsafe { world.broadcast(span(&mut [0.0f32]), 999) }.unwrap_err();
        assert!(matches!(&wrong, CommError::Call { what, .. } if what.contains("root")), "{wrong}");
        assert!(std::mem::replace(&mut world.failed, false));
    }
}

/// A number that differs between ranks and is rounded when it is added.
fn value(rank: usize, at: usize) -> f64 {
    let hash = (rank as u64 * 1_000_003 + at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((hash >> 40) as f64 - 8e6) * 1.000_000_1_f64.powi(at as i32 % 7) / 3.0
}

fn values32(rank: usize, length: usize) -> Vec<f32> {
    (0..length).map(|at| value(rank, at) as f32).collect()
}

/// The sum in the order of the ranks.
fn sums32(size: usize, length: usize) -> Vec<f32> {
    let all: Vec<Vec<f32>> = (0..size).map(|rank| values32(rank, length)).collect();
    (0..length).map(|at| all[1..].iter().fold(all[0][at], |sum, values| sum + values[at])).collect()
}

fn span<T>(values: &mut [T]) -> Span {
    Span { pointer: values.as_mut_ptr().cast(), bytes: size_of_val(values) }
}

fn all_reduce(world: &mut Mpi, length: usize) {
    let mut values = values32(world.rank(), length);
    let mut doubles: Vec<f64> = (0..length).map(|at| value(world.rank(), at)).collect();
    // SAFETY: memory of this function.
    unsafe {
        world.all_reduce(&[(span(&mut values), Number::F32), (span(&mut doubles), Number::F64)]).unwrap();
    }
    assert!(values == sums32(world.size(), length), "f32, {length}");
    let double = |at| (1..world.size()).fold(value(0, at), |sum, rank| sum + value(rank, at));
    assert!(doubles.iter().enumerate().all(|(at, sum)| *sum == double(at)), "f64, {length}");
}

/// Hundreds of spans of all sizes in one call.
fn many_spans(world: &mut Mpi) {
    let lengths: Vec<usize> = (0..300).map(|i| [1, 7, 64, 0, 513, 5000][i % 6]).collect();
    let mut all: Vec<Vec<f32>> = lengths.iter().map(|length| values32(world.rank(), *length)).collect();
    let spans: Vec<(Span, Number)> = all.iter_mut().map(|values| (span(values), Number::F32)).collect();
    // SAFETY: memory of this function.
    unsafe { world.all_reduce(&spans).unwrap() };
    for (values, length) in all.iter().zip(lengths) {
        assert!(*values == sums32(world.size(), length), "{length}");
    }
}

/// Ways to split a number of f32 among ranks: even, everything at the last rank, growing parts, an empty first one.
fn splits(length: usize, size: usize) -> Vec<Vec<Range<usize>>> {
    let weights: [fn(usize, usize) -> usize; 4] =
        [|_, _| 1, |rank, size| usize::from(rank + 1 == size), |rank, _| rank * rank + 1, |rank, _| rank];
    let split = |weight: fn(usize, usize) -> usize| {
        let total: usize = (0..size).map(|rank| weight(rank, size)).sum::<usize>().max(1);
        let (mut seen, mut start) = (0, 0);
        let mut parts = Vec::new();
        for rank in 0..size {
            seen += weight(rank, size);
            let end = if rank + 1 == size { length } else { length * seen / total };
            parts.push(4 * start..4 * end);
            start = end;
        }
        parts
    };
    weights.map(split).into()
}

fn reduce_scatter(world: &mut Mpi, length: usize) {
    for parts in splits(length, world.size()) {
        let mut values = values32(world.rank(), length);
        // SAFETY: memory of this function.
        unsafe { world.reduce_scatter(span(&mut values), &parts).unwrap() };
        let own = parts[world.rank()].start / 4..parts[world.rank()].end / 4;
        assert!(values[own.clone()] == sums32(world.size(), length)[own], "{parts:?}");
    }
}

fn all_gather(world: &mut Mpi, length: usize) {
    let whole = values32(7, length);
    for parts in splits(length, world.size()) {
        let mut values = vec![f32::NAN; length];
        let own = parts[world.rank()].start / 4..parts[world.rank()].end / 4;
        values[own.clone()].copy_from_slice(&whole[own]);
        // SAFETY: memory of this function.
        unsafe { world.all_gather(span(&mut values), &parts).unwrap() };
        assert!(values == whole, "{parts:?}");
    }
}

fn broadcast(world: &mut Mpi, length: usize) {
    for root in 0..world.size() {
        let mut values = values32(world.rank(), length);
        // SAFETY: memory of this function.
        unsafe { world.broadcast(span(&mut values), root).unwrap() };
        assert!(values == values32(root, length), "{root}");
    }
}
