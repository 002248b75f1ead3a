//! Reads which rank this process is from the environment variables that launchers set.
//!
//! Known launchers are `--ranks` of this program, torchrun, Open MPI, MPICH and Intel MPI (PMI), MVAPICH and Slurm's
//! srun. The innermost launcher counts: our own, then torchrun, then MPI, then Slurm, whose allocation alone starts
//! nothing. Incomplete or contradicting variables are errors, because a rank that believes to be alone would train the
//! wrong thing silently. A single rank does not count as a launch.
//! Left out: connecting to the others. The environment is passed as a function, so that tests can pass their own.

use super::node_list::{expand_nodes, tasks_on_node};
use crate::failure::Failure;

pub const RANK_VARIABLE: &str = "SMIDGEN_RANK";
pub const RANKS_VARIABLE: &str = "SMIDGEN_RANKS";
pub const LOCAL_RANK_VARIABLE: &str = "SMIDGEN_LOCAL_RANK";
pub const LOCAL_RANKS_VARIABLE: &str = "SMIDGEN_LOCAL_RANKS";
pub const MASTER_VARIABLE: &str = "SMIDGEN_MASTER";
pub const JOB_VARIABLE: &str = "SMIDGEN_JOB";

/// The port of rank 0 if no variable has one and the job has no name.
const DEFAULT_PORT: u16 = 29_517;

/// Slurm's step numbers from here on are not started by srun, but are batch scripts and interactive shells.
const SPECIAL_STEPS: u64 = 4_294_967_280;

/// The program that started the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `--ranks` of this program.
    Own,
    Torchrun,
    OpenMpi,
    Mvapich,
    /// MPICH, Intel MPI, or Slurm with `--mpi=pmi2`.
    Pmi,
    Slurm,
}

impl Launcher {
    pub fn name(self) -> &'static str {
        match self {
            Launcher::Own => "--ranks",
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Mvapich => "MVAPICH",
            Launcher::Pmi => "mpiexec (PMI)",
            Launcher::Slurm => "srun",
        }
    }
}

/// The address at which rank 0 listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MasterAddress {
    pub host: String,
    pub port: u16,
    /// The variables that the user can change if the address is wrong.
    pub named_by: &'static str,
}

/// One rank of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    pub rank: usize,
    pub size: usize,
    /// Among the ranks of this machine.
    pub local_rank: usize,
    pub local_size: usize,
    pub launcher: Launcher,
    /// `None` on several machines if no variable has it. MPI can find it; otherwise the user must set it.
    pub master: Option<MasterAddress>,
    /// The launcher's name for the job, which differs between jobs. Empty if it has none.
    pub job: String,
}

/// Looks up an environment variable by name.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Reads the variables of this process.
pub fn launch_of_this_process() -> Result<Option<Launch>, Failure> {
    read_launch(&|name| std::env::var(name).ok())
}

/// `None` if no launcher started this process, or it is the only rank.
pub fn read_launch(lookup: Lookup) -> Result<Option<Launch>, Failure> {
    let lookup =
        &|name: &str| lookup(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
    let Some((names, rank, size)) = read_rank(lookup)? else { return Ok(None) };
    if size == 1 {
        return Ok(None);
    }
    let local_rank = read_local(lookup, names.local_ranks, names.local_rank_remedy)?;
    let local_size = match tasks_here(lookup, names.launcher)? {
        Some(tasks) => tasks,
        // `--ranks` starts ranks of one machine.
        None if names.launcher == Launcher::Own => read_number(lookup, LOCAL_RANKS_VARIABLE)?.unwrap_or(size),
        None => read_local(lookup, names.local_sizes, names.local_rank_remedy)?,
    };
    if local_rank >= local_size || local_size > size {
        return Err(Failure::command(format!(
            "{} says that this is rank {rank} of {size}, and {local_rank} of {local_size} on this machine",
            names.launcher.name()
        )));
    }
    let job = job_of(lookup, names.launcher);
    let master = read_master(lookup, names.launcher, size == local_size, &job)?;
    Ok(Some(Launch { rank, size, local_rank, local_size, launcher: names.launcher, master, job }))
}

/// The variables that a launcher sets.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    size: &'static str,
    /// The first that is set counts.
    local_ranks: &'static [&'static str],
    local_sizes: &'static [&'static str],
    local_rank_remedy: &'static str,
}

const MPI_REMEDY: &str = "set `LOCAL_RANK` and `LOCAL_WORLD_SIZE` for each rank: its number on its machine, counted \
                          from 0, and the number of ranks there";

const OWN: Names = Names {
    launcher: Launcher::Own,
    rank: RANK_VARIABLE,
    size: RANKS_VARIABLE,
    local_ranks: &[LOCAL_RANK_VARIABLE],
    local_sizes: &[],
    local_rank_remedy: "`--ranks` sets all of them; unset those that are left over",
};

const TORCHRUN: Names = Names {
    launcher: Launcher::Torchrun,
    rank: "RANK",
    size: "WORLD_SIZE",
    local_ranks: &["LOCAL_RANK", "SLURM_LOCALID"],
    local_sizes: &["LOCAL_WORLD_SIZE"],
    local_rank_remedy: MPI_REMEDY,
};

const MPI: [Names; 3] = [
    Names {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_ranks: &["OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"],
        local_sizes: &["OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"],
        local_rank_remedy: MPI_REMEDY,
    },
    Names {
        launcher: Launcher::Mvapich,
        rank: "MV2_COMM_WORLD_RANK",
        size: "MV2_COMM_WORLD_SIZE",
        local_ranks: &["MV2_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"],
        local_sizes: &["MV2_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"],
        local_rank_remedy: MPI_REMEDY,
    },
    Names {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_ranks: &["MPI_LOCALRANKID", "SLURM_LOCALID", "LOCAL_RANK"],
        local_sizes: &["MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE"],
        local_rank_remedy: MPI_REMEDY,
    },
];

const SLURM: Names = Names {
    launcher: Launcher::Slurm,
    rank: "SLURM_PROCID",
    size: "SLURM_NTASKS",
    local_ranks: &["SLURM_LOCALID"],
    local_sizes: &["SLURM_NTASKS_PER_NODE"],
    local_rank_remedy: "start the ranks with `srun`, which sets it",
};

/// The launcher that counts, the rank, and the number of ranks.
fn read_rank(lookup: Lookup) -> Result<Option<(Names, usize, usize)>, Failure> {
    if let Some((rank, size)) = read_pair(lookup, &OWN)? {
        return Ok(Some((OWN, rank, size)));
    }
    let torchrun = read_pair(lookup, &TORCHRUN)?;
    // Torchrun's agent sets it only for its own processes, so torchrun is the innermost launcher.
    if let Some((rank, size)) = torchrun.filter(|_| lookup("TORCHELASTIC_RUN_ID").is_some()) {
        return Ok(Some((TORCHRUN, rank, size)));
    }
    let mut claims = Vec::new();
    for names in MPI {
        claims.extend(read_pair(lookup, &names)?.map(|(rank, size)| (names, rank, size)));
    }
    // Scripts under MPI often export torchrun's names themselves.
    claims.extend(torchrun.map(|(rank, size)| (TORCHRUN, rank, size)));
    let mut claims = claims.into_iter();
    if let Some((names, rank, size)) = claims.next() {
        return match claims.find(|(_, other, of)| (*other, *of) != (rank, size)) {
            None => Ok(Some((names, rank, size))),
            Some((others, other, of)) => Err(Failure::command(format!(
                "{} and {} disagree: `{}` says rank {rank} of {size}, `{}` says rank {other} of {of}",
                names.launcher.name(),
                others.launcher.name(),
                names.rank,
                others.rank,
            ))
            .hint(format!("unset the variables of the one that did not start this process: `{}` and `{}`, or `{}` and `{}`", names.rank, names.size, others.rank, others.size))),
        };
    }
    if let Some((rank, size)) = read_slurm(lookup)? {
        return Ok(Some((SLURM, rank, size)));
    }
    match lookup("PMIX_RANK") {
        None => Ok(None),
        Some(rank) => Err(Failure::command(format!(
            "`PMIX_RANK` says that this is rank {rank}, but no variable has the number of ranks"
        ))
        .hint("start the ranks with `--ranks`, `mpiexec`, `torchrun --no-python` or `srun`")),
    }
}

/// The rank and the number of ranks, if a launcher set both; one of them alone is an error.
fn read_pair(lookup: Lookup, names: &Names) -> Result<Option<(usize, usize)>, Failure> {
    let (rank, size) = (read_number(lookup, names.rank)?, read_number(lookup, names.size)?);
    match (rank, size) {
        (None, None) => Ok(None),
        // A single rank needs no rank variable.
        (None, Some(1)) => Ok(Some((0, 1))),
        (Some(rank), Some(size)) if rank < size => Ok(Some((rank, size))),
        (Some(rank), Some(size)) => Err(Failure::command(format!(
            "`{}={rank}` is not a rank of `{}={size}`: ranks count from 0",
            names.rank, names.size
        ))),
        (rank, _) => {
            let (is, is_not) =
                if rank.is_some() { (names.rank, names.size) } else { (names.size, names.rank) };
            Err(only_one_set(is, is_not, names.launcher))
        }
    }
}

/// The error for a launcher that set only one of two variables.
fn only_one_set(is: &str, is_not: &str, launcher: Launcher) -> Failure {
    Failure::command(format!("`{is}` is set and `{is_not}` is not, but {} sets both", launcher.name()))
        .hint(format!("set `{is_not}` too, or unset `{is}` to train with one rank"))
}

/// Rank and number of ranks in a step of srun. An allocation, a batch script and an interactive shell also have some of
/// its variables, but are not ranks.
fn read_slurm(lookup: Lookup) -> Result<Option<(usize, usize)>, Failure> {
    let step = match lookup("SLURM_STEP_ID") {
        Some(_) => read_number(lookup, "SLURM_STEP_ID")?,
        None => read_number(lookup, "SLURM_STEPID")?,
    };
    if step.is_none_or(|step| step as u64 >= SPECIAL_STEPS) || lookup("SLURM_PROCID").is_none() {
        return Ok(None);
    }
    let size = match lookup("SLURM_STEP_NUM_TASKS") {
        Some(_) => "SLURM_STEP_NUM_TASKS",
        None => SLURM.size,
    };
    read_pair(lookup, &Names { size, ..SLURM })
}

/// The number of ranks on this node according to Slurm, unless the launcher itself sets it.
fn tasks_here(lookup: Lookup, launcher: Launcher) -> Result<Option<usize>, Failure> {
    let is_slurm = match launcher {
        Launcher::Slurm => true,
        // Srun with PMI, or a script that exports torchrun's variables.
        Launcher::Pmi => lookup("MPI_LOCALNRANKS").is_none() && lookup("LOCAL_WORLD_SIZE").is_none(),
        Launcher::Torchrun => lookup("LOCAL_WORLD_SIZE").is_none(),
        Launcher::Own | Launcher::OpenMpi | Launcher::Mvapich => false,
    };
    if !is_slurm || read_slurm(lookup)?.is_none() {
        return Ok(None);
    }
    let node = read_number(lookup, "SLURM_NODEID")?.unwrap_or(0);
    let lists = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    Ok(lists.iter().find_map(|list| tasks_on_node(&lookup(list)?, node)))
}

fn read_local(lookup: Lookup, names: &[&'static str], remedy: &str) -> Result<usize, Failure> {
    for name in names {
        if let Some(number) = read_number(lookup, name)? {
            return Ok(number);
        }
    }
    Err(Failure::command(format!("this is one of several ranks, and `{}` is not set", names[0])).hint(remedy))
}

fn read_number(lookup: Lookup, name: &str) -> Result<Option<usize>, Failure> {
    let Some(value) = lookup(name) else { return Ok(None) };
    let number = value.parse().map_err(|_| Failure::command(format!("`{name}={value}` is not a number")));
    number.map(Some)
}

/// The address of rank 0: that of the variables, else this machine if all ranks are on it, else Slurm's first host.
fn read_master(
    lookup: Lookup,
    launcher: Launcher,
    is_one_machine: bool,
    job: &str,
) -> Result<Option<MasterAddress>, Failure> {
    if launcher == Launcher::Own {
        let Some(master) = lookup(MASTER_VARIABLE) else {
            return Err(only_one_set(RANK_VARIABLE, MASTER_VARIABLE, launcher));
        };
        let parts = master.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let Some((host, port)) = parts.filter(|(host, port)| !host.is_empty() && *port != 0) else {
            return Err(Failure::command(format!("`{MASTER_VARIABLE}={master}` is not `host:port`")));
        };
        return Ok(Some(MasterAddress { host: host.to_owned(), port, named_by: MASTER_VARIABLE }));
    }
    let (host, port) = (lookup("MASTER_ADDR"), read_port(lookup)?);
    if launcher == Launcher::Torchrun {
        let missing = match (&host, port) {
            (None, _) => Some("MASTER_ADDR"),
            (_, None) => Some("MASTER_PORT"),
            _ => None,
        };
        if let Some(missing) = missing {
            return Err(only_one_set("RANK", missing, launcher));
        }
    }
    let port = port.unwrap_or_else(|| port_of(job));
    let local = || is_one_machine.then(|| "127.0.0.1".to_owned());
    let first_node = || {
        let list = lookup("SLURM_STEP_NODELIST").or_else(|| lookup("SLURM_JOB_NODELIST"))?;
        expand_nodes(&list)?.into_iter().next()
    };
    let host = host.or_else(local).or_else(first_node);
    Ok(host.map(|host| MasterAddress { host, port, named_by: "MASTER_ADDR and MASTER_PORT" }))
}

fn read_port(lookup: Lookup) -> Result<Option<u16>, Failure> {
    let Some(port) = read_number(lookup, "MASTER_PORT")? else { return Ok(None) };
    // If torchrun's agent listens at the port itself, it says so in this variable; the ranks then use the next port.
    let is_taken = lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    match u16::try_from(port + usize::from(is_taken)) {
        Ok(port) if port > 0 => Ok(Some(port)),
        _ => Err(Failure::command(format!("`MASTER_PORT={port}` is not a port that can be used"))
            .hint("choose one between 1024 and 65534")),
    }
}

/// A port that follows from the job's name, so that jobs on one machine use different ones. It is below the ports that
/// the system assigns.
fn port_of(job: &str) -> u16 {
    if job.is_empty() {
        return DEFAULT_PORT;
    }
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    20_000 + (hash % 9_000) as u16
}

fn job_of(lookup: Lookup, launcher: Launcher) -> String {
    let of = |name: &str| lookup(name).unwrap_or_default();
    match launcher {
        Launcher::Own => of(JOB_VARIABLE),
        Launcher::Torchrun => of("TORCHELASTIC_RUN_ID"),
        Launcher::OpenMpi => of("PMIX_NAMESPACE"),
        Launcher::Mvapich | Launcher::Pmi => String::new(),
        Launcher::Slurm => match lookup("SLURM_JOB_ID") {
            // Steps of one job can run at the same time.
            Some(job) => format!(
                "slurm {job}.{}",
                lookup("SLURM_STEP_ID").or_else(|| lookup("SLURM_STEPID")).unwrap_or_default()
            ),
            None => String::new(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a launch from `A=1 B=2`.
    fn read(variables: &str) -> Result<Option<Launch>, Failure> {
        let pairs: Vec<(&str, &str)> =
            variables.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect();
        let lookup =
            |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        read_launch(&lookup)
    }

    /// `launcher rank/size local/of host:port`.
    fn short(variables: &str) -> String {
        match read(variables) {
            Ok(None) => "none".into(),
            Ok(Some(launch)) => {
                let master =
                    launch.master.map_or("-".into(), |master| format!("{}:{}", master.host, master.port));
                let Launch { rank, size, local_rank, local_size, launcher, .. } = launch;
                format!("{launcher:?} {rank}/{size} {local_rank}/{local_size} {master}")
            }
            Err(failure) => failure.message,
        }
    }

    const TORCH: &str = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500";
    const SRUN: &str = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1 \
                        SLURM_TASKS_PER_NODE=2(x2) SLURM_JOB_NODELIST=n[01-02]";

    #[test]
    fn launchers_are_recognized() {
        let slurm_port = port_of("slurm 7.0");
        let cases = [
            ("".to_owned(), "none".to_owned()),
            ("PATH=/bin HOME=/root".into(), "none".into()),
            (
                "SMIDGEN_RANK=1 SMIDGEN_RANKS=2 SMIDGEN_LOCAL_RANK=1 SMIDGEN_MASTER=127.0.0.1:9 \
                 RANK=5"
                    .into(),
                "Own 1/2 1/2 127.0.0.1:9".into(),
            ),
            (TORCH.into(), "Torchrun 3/4 1/2 a:29500".into()),
            (format!("{TORCH} TORCHELASTIC_USE_AGENT_STORE=True"), "Torchrun 3/4 1/2 a:29501".into()),
            (format!("{TORCH} TORCHELASTIC_USE_AGENT_STORE=False"), "Torchrun 3/4 1/2 a:29500".into()),
            // Torchrun inside srun and inside mpiexec, which start one agent on each machine.
            (format!("{TORCH} TORCHELASTIC_RUN_ID=x {SRUN}"), "Torchrun 3/4 1/2 a:29500".into()),
            (
                format!("{TORCH} TORCHELASTIC_RUN_ID=x PMI_RANK=1 PMI_SIZE=2"),
                "Torchrun 3/4 1/2 a:29500".into(),
            ),
            (
                "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2".into(),
                format!("Pmi 1/2 1/2 127.0.0.1:{DEFAULT_PORT}"),
            ),
            ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1".into(), "Pmi 1/2 0/1 -".into()),
            (
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 \
                 OMPI_COMM_WORLD_LOCAL_SIZE=1 PMIX_RANK=1 MASTER_ADDR=h MASTER_PORT=77"
                    .into(),
                "OpenMpi 1/2 0/1 h:77".into(),
            ),
            (
                "MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=0 \
                 MV2_COMM_WORLD_LOCAL_SIZE=2"
                    .into(),
                format!("Mvapich 0/2 0/2 127.0.0.1:{DEFAULT_PORT}"),
            ),
            (SRUN.into(), format!("Slurm 3/4 1/2 n01:{slurm_port}")),
            // Srun with PMI sets no local ranks of MPI.
            (format!("PMI_RANK=3 PMI_SIZE=4 {SRUN}"), format!("Pmi 3/4 1/2 n01:{DEFAULT_PORT}")),
            // A script under srun that exports torchrun's names.
            (
                format!("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=n01 MASTER_PORT=1234 {SRUN}"),
                "Torchrun 3/4 1/2 n01:1234".into(),
            ),
            // A script under Open MPI that exports torchrun's names.
            (
                format!("{TORCH} OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4"),
                "OpenMpi 3/4 1/2 a:29500".into(),
            ),
        ];
        for (variables, launch) in cases {
            assert_eq!(short(&variables), launch, "{variables}");
        }
    }

    #[test]
    fn a_single_rank_is_not_a_launch() {
        for variables in [
            "RANK=0 WORLD_SIZE=1",
            "WORLD_SIZE=1",
            "PMI_RANK=0 PMI_SIZE=1",
            "SMIDGEN_RANK=0 SMIDGEN_RANKS=1",
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
        ] {
            assert_eq!(short(variables), "none", "{variables}");
        }
    }

    #[test]
    fn an_allocation_of_slurm_is_not_a_launch() {
        for variables in [
            // `salloc`.
            "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_JOB_NODELIST=n[1-4]",
            // A batch script.
            "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0",
            "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_ID=4294967291",
            // An interactive step, and `srun --pty bash` in an allocation of four.
            "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_ID=4294967290",
            "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_STEP_ID=1 SLURM_STEP_NUM_TASKS=1",
        ] {
            assert_eq!(short(variables), "none", "{variables}");
        }
    }

    #[test]
    fn missing_variables_are_named() {
        let cases = [
            ("RANK=1", "`RANK` is set and `WORLD_SIZE` is not"),
            ("WORLD_SIZE=2", "`WORLD_SIZE` is set and `RANK` is not"),
            ("WORLD_SIZE=2 RANK=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", "`RANK` is set and `MASTER_ADDR` is not"),
            (
                "WORLD_SIZE=2 RANK=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a",
                "`RANK` is set and `MASTER_PORT` is not",
            ),
            ("WORLD_SIZE=2 RANK=1 MASTER_ADDR=a MASTER_PORT=1", "`LOCAL_RANK` is not set"),
            ("WORLD_SIZE=2 RANK=1 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1", "`LOCAL_WORLD_SIZE` is not set"),
            ("PMI_RANK=0", "`PMI_RANK` is set and `PMI_SIZE` is not"),
            ("PMI_RANK=0 PMI_SIZE=2", "`MPI_LOCALRANKID` is not set"),
            ("OMPI_COMM_WORLD_SIZE=2", "`OMPI_COMM_WORLD_SIZE` is set and `OMPI_COMM_WORLD_RANK` is not"),
            ("SMIDGEN_RANK=0", "`SMIDGEN_RANK` is set and `SMIDGEN_RANKS` is not"),
            (
                "SMIDGEN_RANK=0 SMIDGEN_RANKS=2 SMIDGEN_LOCAL_RANK=0 SMIDGEN_LOCAL_RANKS=2",
                "`SMIDGEN_RANK` is set and `SMIDGEN_MASTER` is not",
            ),
            ("SLURM_STEP_ID=0 SLURM_PROCID=0", "`SLURM_PROCID` is set and `SLURM_NTASKS` is not"),
            ("SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2", "`SLURM_LOCALID` is not set"),
            ("PMIX_RANK=2", "no variable has the number of ranks"),
        ];
        for (variables, message) in cases {
            let failure = read(variables).expect_err(variables);
            assert!(failure.message.contains(message), "{variables}: {failure}");
            assert!(!failure.hints.is_empty(), "{variables}");
            assert_eq!(failure.exit_code(), 2, "{variables}");
        }
    }

    #[test]
    fn contradictions_are_named() {
        let cases = [
            ("RANK=2 WORLD_SIZE=2", "`RANK=2` is not a rank of `WORLD_SIZE=2`"),
            ("RANK=-1 WORLD_SIZE=2", "`RANK=-1` is not a number"),
            ("RANK=0 WORLD_SIZE=0", "`RANK=0` is not a rank of `WORLD_SIZE=0`"),
            ("PMI_RANK=1 PMI_SIZE=2 RANK=0 WORLD_SIZE=2", "mpiexec (PMI) and torchrun disagree"),
            (
                "PMI_RANK=1 PMI_SIZE=2 RANK=0 WORLD_SIZE=1",
                "`PMI_RANK` says rank 1 of 2, `RANK` says rank 0 of 1",
            ),
            (
                "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=3 MPI_LOCALNRANKS=2",
                "rank 1 of 2, and 3 of 2 on this machine",
            ),
            (
                "SMIDGEN_RANK=0 SMIDGEN_RANKS=2 SMIDGEN_LOCAL_RANK=0 SMIDGEN_LOCAL_RANKS=2 SMIDGEN_MASTER=host",
                "`SMIDGEN_MASTER=host` is not `host:port`",
            ),
            (
                "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65535 \
                 TORCHELASTIC_USE_AGENT_STORE=True",
                "`MASTER_PORT=65535` is not a port",
            ),
            ("SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=2", "`SLURM_PROCID=2` is not a rank"),
        ];
        for (variables, message) in cases {
            let failure = read(variables).expect_err(variables);
            assert!(failure.message.contains(message), "{variables}: {failure}");
        }
    }

    #[test]
    fn empty_variables_are_not_set() {
        let launch = read_launch(&|name| (name == "RANK" || name == "WORLD_SIZE").then(String::new)).unwrap();
        assert_eq!(launch, None);
    }

    #[test]
    fn jobs_get_ports_below_those_of_the_system() {
        for job in ["slurm 1.0", "slurm 2.0", "x"] {
            assert!((20_000..29_000).contains(&port_of(job)));
        }
        assert_ne!(port_of("slurm 1.0"), port_of("slurm 2.0"));
    }
}
