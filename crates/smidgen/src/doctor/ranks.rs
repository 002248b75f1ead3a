//! Checks what runs with several ranks need on this machine: NCCL, MPI, a launcher, GPUs.
//!
//! Nothing is started. A missing part is a warning, because a run with one rank needs none of them; the remedy says how
//! to install it.
//! Left out: bandwidth between ranks (`all_reduce.rs`), and which GPUs can access each other's memory.

use super::Check;
use crate::failure::Failure;
use serde_json::json;
use smidgen_runtime::comm::{CommError, Mpi, Nccl, mpi_places};
use smidgen_runtime::cuda;

/// More GPUs than any machine has.
const MOST_GPUS: usize = 64;

pub fn check() -> Vec<Check> {
    let mpiexec = mpi_places::find_mpiexec();
    let mpiexec = mpiexec.map(|found| format!("`{}`, {}", found.path.display(), found.version));
    let gpus = (0..MOST_GPUS).take_while(|ordinal| cuda::query(*ordinal).is_ok()).count();
    let nccl = Nccl::describe_library();
    let between = match (gpus, &nccl) {
        (0, _) => "no GPU: CPU ranks over MPI".to_owned(),
        (count, Ok(_)) => format!("up to {count} GPU ranks over NCCL"),
        (count, Err(_)) => format!("up to {count} GPU ranks over MPI through pinned memory"),
    };
    vec![
        found("nccl", nccl),
        found("mpi", Mpi::describe_library()),
        found("mpiexec", mpiexec),
        Check::pass("ranks", between).with(json!({ "gpus": gpus })),
    ]
}

fn found(name: &'static str, what: Result<String, CommError>) -> Check {
    match what {
        Ok(what) => Check::pass(name, what),
        Err(error) => {
            let Failure { message, hints, .. } = Failure::from(error);
            let remedy = hints.first().map_or("see `docs/ranks.md`", String::as_str);
            Check::warn(name, message, remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn what_is_missing_is_a_warning_with_a_remedy() {
        let missing = CommError::Missing { what: "MPI", file: "libmpi_abi.so.1", remedy: "install it" };
        let check = found("mpi", Err(missing));
        assert_eq!(
            (check.verdict, check.finding.as_str()),
            (Verdict::Warn, "MPI not found (`libmpi_abi.so.1`)")
        );
        assert_eq!(check.remedies, ["install it"]);
        assert_eq!(found("mpi", Ok("MPICH".into())).verdict, Verdict::Pass);
    }
}
