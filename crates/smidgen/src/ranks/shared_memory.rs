//! Pinned memory that the ranks of a machine share: the first of them creates it, the others open it.
//!
//! Frozen weights that are offloaded to host RAM are the same on every rank, so a machine holds one copy. Ranks with
//! the same boot id are on one machine. Either all ranks get the memory, or all get the same error.

use super::team::Team;
use crate::failure::Failure;
use crate::machine::host::free_memory_bytes;
use smidgen_ir::bytes::format_bytes;
use smidgen_runtime::SharedHost;

/// Shares this many bytes between the ranks of this machine. The first of them fills the memory.
///
/// # Errors
/// Too little free memory, or ranks in different containers, which do not see each other's memory.
pub fn share_host(team: &mut Team, bytes: usize) -> Result<SharedHost, Failure> {
    share_on(team, &machine(), bytes, free_memory_bytes())
}

fn share_on(team: &mut Team, machine: &str, bytes: usize, free: Option<u64>) -> Result<SharedHost, Failure> {
    let machines: Vec<String> = team.exchange(&machine.to_owned())?;
    let own = team.link().rank();
    let first = machines.iter().position(|other| other == machine).unwrap_or(own);
    let made = (first == own).then(|| create(bytes, free));
    let address = made.as_ref().and_then(|made| made.as_ref().ok()).map(SharedHost::address);
    let addresses: Vec<Option<String>> = team.exchange(&address)?;
    let shared = match (made, &addresses[first]) {
        (Some(made), _) => made,
        (None, Some(address)) => SharedHost::open(address, bytes).map_err(|error| error.to_string()),
        (None, None) => Err(format!("rank {first} could not create it")),
    };
    let failures: Vec<Option<String>> = team.exchange(&shared.as_ref().err().cloned())?;
    let failed = failures.into_iter().enumerate().find_map(|(rank, why)| Some((rank, why?)));
    match (shared, failed) {
        (Ok(shared), None) => Ok(shared),
        (_, failed) => {
            let (rank, why) = failed.unwrap_or((own, "unknown".into()));
            let bytes = format_bytes(bytes as u64);
            let message =
                format!("rank {rank} cannot share {bytes} of pinned memory with its machine: {why}");
            Err(Failure::memory(message)
                .hint("the ranks of a machine share offloaded weights: start them in one container")
                .hint("`memory.weights = \"disk\"` offloads to a file of each rank; `memory.host_budget` limits what is pinned"))
        }
    }
}

/// Checks free memory first, because the kernel kills a process instead of refusing memory that the machine does not
/// have.
fn create(bytes: usize, free: Option<u64>) -> Result<SharedHost, String> {
    match free.filter(|free| *free < bytes as u64) {
        Some(free) => Err(format!("only {} is free", format_bytes(free))),
        None => SharedHost::create(bytes).map_err(|error| error.to_string()),
    }
}

/// An id of this machine.
fn machine() -> String {
    let files = ["/proc/sys/kernel/random/boot_id", "/proc/sys/kernel/hostname"];
    files.iter().find_map(|file| std::fs::read_to_string(file).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::link_tests::as_ranks;

    #[test]
    fn ranks_of_a_machine_have_one_copy() {
        let seen = as_ranks(4, |link, _| {
            let rank = link.rank();
            let mut team = Team::new(link);
            // Ranks 0 and 2 are on one machine, 1 and 3 on another.
            let machine = if rank % 2 == 0 { "even" } else { "odd" };
            let shared = share_on(&mut team, machine, 1 << 16, None).unwrap();
            if shared.is_filler() {
                shared.write_at(100, machine.as_bytes()).unwrap();
            }
            team.link().barrier().unwrap();
            let mut bytes = vec![0; machine.len()];
            shared.read_at(100, &mut bytes).unwrap();
            team.link().barrier().unwrap();
            team.into_link().close().unwrap();
            (shared.is_filler(), String::from_utf8(bytes).unwrap())
        });
        let [even, odd] = ["even", "odd"].map(str::to_owned);
        assert_eq!(seen, [(true, even.clone()), (true, odd.clone()), (false, even), (false, odd)]);
    }

    #[test]
    fn too_little_free_memory_is_an_error_on_all_ranks() {
        let messages = as_ranks(2, |link, _| {
            let mut team = Team::new(link);
            let failure = share_on(&mut team, "here", 2 << 16, Some(1 << 16)).unwrap_err();
            team.into_link().close().unwrap();
            failure.message
        });
        for message in messages {
            let expected =
                "rank 0 cannot share 128.00 KiB of pinned memory with its machine: only 64.00 KiB is free";
            assert_eq!(message, expected);
        }
        assert!(create(1 << 16, Some(1 << 16)).is_ok());
    }
}
