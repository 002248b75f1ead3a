//! Joins the ranks of a run: finds the others, chooses the device of this rank, and connects it to theirs.
//!
//! CPU ranks exchange tensors over MPI, GPU ranks over NCCL if it is installed, else over MPI through pinned memory. If
//! MPI runs, it sends the address of rank 0 to the others; otherwise the launcher gives it. If a rank is lost this
//! process exits, because nothing else would wake a thread that waits inside a collective.

use super::follow::{Following, follow_launcher};
use super::heartbeat::{OnLoss, Times};
use super::launch::{Launch, Launcher};
use super::link::Link;
use super::rendezvous::{Listener, Member};
use super::spawn::Engine;
use super::team::Team;
use crate::console::progress::say_failure;
use crate::failure::{Failure, FailureKind};
use crate::plan::rank_layout::RankLayout;
use smidgen_ir::Rank;
use smidgen_recipe::{DeviceChoice, Recipe};
use smidgen_runtime::comm::{self, Comm, CommError, Mpi, Nccl};
use smidgen_runtime::cuda::peers::Peers;
use smidgen_runtime::{AnyDevice, cuda};

/// A rank that is connected to the others.
#[derive(Debug)]
pub struct Joined {
    pub world: RankLayout,
    pub team: Team,
    collectives: Collectives,
    /// Sends a farewell to the launcher when it is dropped.
    _following: Option<Following>,
}

/// What exchanges tensors.
#[derive(Debug)]
enum Collectives {
    Mpi(Option<Mpi>),
    Nccl([u8; 128]),
}

/// The engine for the ranks of this recipe: NCCL for GPU ranks, unless they share a GPU, which NCCL refuses.
pub fn engine_of(recipe: &Recipe) -> Engine {
    let has_gpu = matches!(cuda::query(0), Ok(facts) if facts.can_train());
    match recipe.memory.device {
        DeviceChoice::Auto if has_gpu && Nccl::describe_library().is_ok() => Engine::Nccl,
        DeviceChoice::Auto | DeviceChoice::Cpu | DeviceChoice::Cuda(_) => Engine::Mpi,
    }
}

impl Joined {
    /// Connects to the other ranks, and gives this one its device.
    ///
    /// # Errors
    /// No engine, a rank that cannot be reached, or one that was started with different arguments.
    pub fn open(launch: &Launch, recipe: &Recipe) -> Result<Joined, Failure> {
        let mut world = world_of(launch);
        let engine = engine_of(recipe);
        world.settle(recipe)?;
        let following = follow_launcher(launch.rank, || {
            comm::mpi::abandon();
            comm::quit(1)
        });
        let on_loss: OnLoss = Box::new(|failure: Failure| {
            say_failure(&failure);
            comm::mpi::abandon();
            comm::quit(failure.exit_code())
        });
        let starts_mpi = matches!(
            launch.launcher,
            Launcher::Pmi | Launcher::OpenMpi | Launcher::Mvapich | Launcher::Slurm
        );
        let (link, collectives) = match engine {
            Engine::Mpi if !starts_mpi => return Err(not_started_by_mpi(launch)),
            Engine::Mpi => {
                let mut mpi = Mpi::start(launch.rank, launch.size).map_err(Failure::from)?;
                (open_by_mpi(launch, &mut mpi, on_loss)?, Collectives::Mpi(Some(mpi)))
            }
            Engine::Nccl => {
                // If no variable names the machine of rank 0, MPI sends its address.
                let mut link = if launch.master.is_none() && starts_mpi {
                    let mut mpi = Mpi::start(launch.rank, launch.size).map_err(Failure::from)?;
                    open_by_mpi(launch, &mut mpi, on_loss)?
                } else {
                    Link::open(launch, Times::default(), on_loss)?
                };
                let id = if launch.rank == 0 {
                    Nccl::unique_id().map_err(Failure::from)?.to_vec()
                } else {
                    vec![]
                };
                let id = link.broadcast(id)?.try_into();
                let id = id.map_err(|_| Failure::ranks("rank 0 sent something other than the id of NCCL"))?;
                (link, Collectives::Nccl(id))
            }
        };
        link.set_place("the start");
        Ok(Joined { world, team: Team::new(link), collectives, _following: following })
    }

    /// Gives a device its communicator.
    pub fn connect(&mut self, device: AnyDevice) -> Result<AnyDevice, Failure> {
        let rank = self.world.rank;
        match (device, &mut self.collectives) {
            (AnyDevice::Cpu(cpu), Collectives::Mpi(mpi)) => Ok(AnyDevice::Cpu(cpu.with_comm(take(mpi)?))),
            (AnyDevice::Cuda(cuda), Collectives::Mpi(mpi)) => {
                let peers = Peers::staged(take(mpi)?)?;
                Ok(AnyDevice::Cuda(Box::new(cuda.with_peers(peers))))
            }
            (AnyDevice::Cuda(cuda), Collectives::Nccl(id)) => {
                let peers = Peers::nccl(*id, rank.index, rank.of)?;
                Ok(AnyDevice::Cuda(Box::new(cuda.with_peers(peers))))
            }
            (AnyDevice::Cpu(_), Collectives::Nccl(_)) => Err(Failure::ranks("CPU ranks need MPI")),
        }
    }

    /// Ends the link after a success, or tells the others why this rank failed.
    pub fn leave<T>(self, result: Result<T, Failure>) -> Result<T, Failure> {
        let link = self.team.into_link();
        match result {
            Ok(value) => link.close().map(|()| value),
            Err(failure) => {
                // An exchange fails most often because another rank is lost. If so, the handler reports that instead
                // and exits.
                if failure.kind == FailureKind::Ranks {
                    link.failure_within(Times::default().silence + Times::default().farewell);
                }
                comm::mpi::abandon();
                link.abort(&failure.message);
                Err(failure)
            }
        }
    }
}

fn take(mpi: &mut Option<Mpi>) -> Result<Box<dyn Comm>, Failure> {
    mpi.take().map(|mpi| Box::new(mpi) as Box<dyn Comm>).ok_or_else(|| Failure::from(CommError::Again))
}

fn world_of(launch: &Launch) -> RankLayout {
    let machines = launch.size.div_ceil(launch.local_size.max(1));
    RankLayout {
        rank: Rank { index: launch.rank, of: launch.size },
        local: Rank { index: launch.local_rank, of: launch.local_size },
        on_device: 1,
        machines,
        device: None,
    }
}

/// Opens the link with MPI, which sends the address of rank 0 to the others.
fn open_by_mpi(launch: &Launch, mpi: &mut Mpi, on_loss: OnLoss) -> Result<Link, Failure> {
    let member = Member { rank: launch.rank, size: launch.size, job: launch.job.clone() };
    if launch.rank == 0 {
        let (listener, address) = Listener::anywhere()?;
        mpi.broadcast_bytes(address.into_bytes(), 0).map_err(Failure::from)?;
        return Link::serve(listener, &member, Times::default(), on_loss);
    }
    let address = mpi.broadcast_bytes(vec![], 0).map_err(Failure::from)?;
    let address = String::from_utf8(address).map_err(Failure::ranks)?;
    Link::connect(&address, &member, Times::default(), on_loss)
}

fn not_started_by_mpi(launch: &Launch) -> Failure {
    let launcher = launch.launcher.name();
    Failure::ranks(format!("ranks without NCCL communicate over MPI, and {launcher} did not start MPI"))
        .hint("`smidgen train RECIPE --ranks 2` starts them, or `mpiexec -n 2 smidgen train RECIPE`")
}
