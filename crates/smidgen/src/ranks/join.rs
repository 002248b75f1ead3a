//! Joining a run: from what a launcher said to a link, a world and an engine.
//!
//! CPU ranks exchange tensors by MPI, GPU ranks by NCCL where there is one, else by MPI through pinned memory. Where MPI
//! is started, the address of rank 0 travels by it; else the launcher says it. A rank that is lost ends this process:
//! nothing else would wake a thread that waits inside a collective.

use super::follow::{Following, follow_launcher};
use super::heartbeat::{OnLoss, Times};
use super::launch::{Launch, Launcher};
use super::link::Link;
use super::rendezvous::Member;
use super::spawn::Engine;
use super::team::Team;
use crate::console::progress::say_failure;
use crate::failure::{Failure, FailureKind};
use crate::plan::world::World;
use smidgen_ir::Rank;
use smidgen_recipe::{DeviceChoice, Recipe};
use smidgen_runtime::comm::{self, Comm, CommError, Mpi, Nccl};
use smidgen_runtime::cuda::peers::Peers;
use smidgen_runtime::{AnyDevice, cuda};

/// A rank that has found the others.
#[derive(Debug)]
pub struct Joined {
    pub world: World,
    pub team: Team,
    wires: Wires,
    /// Says farewell to the launcher when it is dropped.
    _following: Option<Following>,
}

/// How tensors will travel.
#[derive(Debug)]
enum Wires {
    Mpi(Option<Mpi>),
    Nccl([u8; 128]),
}

/// What ranks of this recipe exchange by: GPU ranks have NCCL, unless they share a GPU, which NCCL refuses.
pub fn engine_of(recipe: &Recipe) -> Engine {
    let has_gpu = matches!(cuda::look(0), Ok(facts) if facts.can_train());
    match recipe.memory.device {
        DeviceChoice::Auto if has_gpu && Nccl::look().is_ok() => Engine::Nccl,
        DeviceChoice::Auto | DeviceChoice::Cpu | DeviceChoice::Cuda(_) => Engine::Mpi,
    }
}

impl Joined {
    /// Finds the other ranks, and gives this one its device.
    ///
    /// # Errors
    /// No engine, a rank that cannot be reached, or one that was started with something else.
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
        let (link, wires) = match engine {
            Engine::Mpi if !starts_mpi => return Err(not_started_by_mpi(launch)),
            Engine::Mpi => {
                let mut mpi = Mpi::start(launch.rank, launch.size).map_err(Failure::from)?;
                (open_by_mpi(launch, &mut mpi, on_loss)?, Wires::Mpi(Some(mpi)))
            }
            Engine::Nccl => {
                // Where nobody names the machine of rank 0, MPI can tell.
                let mut link = match launch.master.is_none() && starts_mpi {
                    true => {
                        let mut mpi = Mpi::start(launch.rank, launch.size).map_err(Failure::from)?;
                        open_by_mpi(launch, &mut mpi, on_loss)?
                    }
                    false => Link::open(launch, Times::default(), on_loss)?,
                };
                let id = if launch.rank == 0 {
                    Nccl::unique_id().map_err(Failure::from)?.to_vec()
                } else {
                    vec![]
                };
                let id = link.broadcast(id)?.try_into();
                let id = id.map_err(|_| Failure::ranks("rank 0 sent something else than the id of NCCL"))?;
                (link, Wires::Nccl(id))
            }
        };
        link.set_place("the start");
        Ok(Joined { world, team: Team::over(link), wires, _following: following })
    }

    /// Gives a device its communicator.
    pub fn connect(&mut self, device: AnyDevice) -> Result<AnyDevice, Failure> {
        let rank = self.world.rank;
        match (device, &mut self.wires) {
            (AnyDevice::Cpu(cpu), Wires::Mpi(mpi)) => Ok(AnyDevice::Cpu(cpu.with_comm(take(mpi)?))),
            (AnyDevice::Cuda(cuda), Wires::Mpi(mpi)) => {
                let peers = Peers::staged(take(mpi)?)?;
                Ok(AnyDevice::Cuda(Box::new(cuda.with_peers(peers))))
            }
            (AnyDevice::Cuda(cuda), Wires::Nccl(id)) => {
                let peers = Peers::nccl(*id, rank.index, rank.of)?;
                Ok(AnyDevice::Cuda(Box::new(cuda.with_peers(peers))))
            }
            (AnyDevice::Cpu(_), Wires::Nccl(_)) => Err(Failure::ranks("CPU ranks need MPI")),
        }
    }

    /// Leaves in order, or tells the others why not.
    pub fn leave<T>(self, result: Result<T, Failure>) -> Result<T, Failure> {
        let link = self.team.into_link();
        match result {
            Ok(value) => link.close().map(|()| value),
            Err(failure) => {
                // An exchange fails most often because another rank is lost: that is said instead, and ends this process.
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

fn world_of(launch: &Launch) -> World {
    let machines = launch.size.div_ceil(launch.local_size.max(1));
    World {
        rank: Rank { index: launch.rank, of: launch.size },
        local: Rank { index: launch.local_rank, of: launch.local_size },
        on_device: 1,
        machines,
        device: None,
    }
}

/// The link where MPI runs: it carries the address of rank 0.
fn open_by_mpi(launch: &Launch, mpi: &mut Mpi, on_loss: OnLoss) -> Result<Link, Failure> {
    let member = Member { rank: launch.rank, size: launch.size, job: launch.job.clone() };
    if launch.rank == 0 {
        let (listener, address) = Link::listen()?;
        mpi.broadcast_bytes(address.into_bytes(), 0).map_err(Failure::from)?;
        return Link::serve(listener, &member, Times::default(), on_loss);
    }
    let address = mpi.broadcast_bytes(vec![], 0).map_err(Failure::from)?;
    let address = String::from_utf8(address).map_err(Failure::ranks)?;
    Link::connect(&address, &member, Times::default(), on_loss)
}

fn not_started_by_mpi(launch: &Launch) -> Failure {
    let launcher = launch.launcher.name();
    Failure::ranks(format!("ranks without NCCL exchange by MPI, and {launcher} did not start one"))
        .hint("`smidgen train RECIPE --ranks 2` starts them, or `mpiexec -n 2 smidgen train RECIPE`")
}
