//! The ranks that a job is planned for, and each rank's share of its machine: device, cores and memory.
//!
//! A process that trains alone is a world of one rank. The ranks need not exist: `smidgen plan` plans for any number of
//! machines. A run fills in which rank it is.
//! Left out: starting ranks and connecting them (`ranks/`).

use crate::failure::Failure;
use crate::plan::profiles;
use smidgen_ir::{DeviceKind, Rank};
use smidgen_recipe::{Batch, DeviceChoice, Recipe};
use smidgen_runtime::cuda;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankLayout {
    pub rank: Rank,
    /// The rank among those of its machine.
    pub local: Rank,
    /// Ranks that share the memory of this rank's device.
    pub on_device: usize,
    pub machines: usize,
    /// The device of this rank, if the recipe does not choose one.
    pub device: Option<DeviceChoice>,
}

impl RankLayout {
    pub const ALONE: RankLayout =
        RankLayout { rank: Rank::ONLY, local: Rank::ONLY, on_device: 1, machines: 1, device: None };

    /// The first of `ranks` ranks on `machines` machines, each rank with its own GPU if `has_gpu`.
    ///
    /// # Errors
    /// No rank, or a number of ranks that cannot be spread evenly.
    pub fn planned(ranks: usize, machines: usize, has_gpu: bool) -> Result<RankLayout, Failure> {
        if ranks == 0 || machines == 0 {
            return Err(Failure::command("a run has at least one rank, on at least one machine"));
        }
        if !ranks.is_multiple_of(machines) {
            return Err(Failure::command(format!(
                "{ranks} ranks cannot be spread evenly over {machines} machines"
            )));
        }
        let local = ranks / machines;
        Ok(RankLayout {
            rank: Rank { index: 0, of: ranks },
            local: Rank { index: 0, of: local },
            on_device: if has_gpu { 1 } else { local },
            machines,
            device: None,
        })
    }

    /// The world that `smidgen plan` is asked to plan for. Each rank has a GPU of its own if the plan is for a GPU,
    /// unless the recipe pins a GPU of this machine (`memory.device`), which all ranks then share.
    ///
    /// # Errors
    /// As [`RankLayout::planned`]; a batch smaller than the ranks; a profile that does not exist.
    pub fn asked_for(ranks: usize, machines: usize, recipe: &Recipe) -> Result<RankLayout, Failure> {
        let named = profiles::named(&recipe.memory)?;
        let kind = profiles::place(&recipe.memory, named.as_ref(), false)?.kind();
        let shares = matches!(recipe.memory.device, DeviceChoice::Cuda(_)) && named.is_none();
        let world = RankLayout::planned(ranks, machines, kind == DeviceKind::Cuda && !shares)?;
        world.check_batch(recipe)?;
        Ok(world)
    }

    /// Such as "8 ranks on 2 machines".
    pub fn describe(&self) -> String {
        let machines =
            if self.machines == 1 { "1 machine".into() } else { format!("{} machines", self.machines) };
        format!("{} ranks on {machines}", self.rank.of)
    }

    pub fn is_alone(&self) -> bool {
        self.rank.is_only()
    }

    /// Whether this is rank 0, which writes the run folder and prints.
    pub fn is_first(&self) -> bool {
        self.rank.index == 0
    }

    /// Gives this rank its device, unless the recipe pins one.
    ///
    /// # Errors
    /// More ranks than GPUs, unless `memory.device` says that they share one; a batch smaller than the ranks.
    pub fn settle(&mut self, recipe: &Recipe) -> Result<(), Failure> {
        if self.is_alone() {
            return Ok(());
        }
        self.check_batch(recipe)?;
        let first = matches!(cuda::query(0), Ok(facts) if facts.can_train());
        match recipe.memory.device {
            DeviceChoice::Auto if first => {
                let ordinal = self.local.index;
                let gpus = (0..self.local.of).take_while(|ordinal| cuda::query(*ordinal).is_ok()).count();
                if gpus < self.local.of {
                    return Err(too_few_gpus(gpus, self.local.of));
                }
                self.device = Some(DeviceChoice::Cuda(ordinal));
                self.on_device = 1;
            }
            DeviceChoice::Auto => {
                self.device = Some(DeviceChoice::Cpu);
                self.on_device = self.local.of;
            }
            // All ranks of the machine share a pinned device.
            DeviceChoice::Cpu | DeviceChoice::Cuda(_) => self.on_device = self.local.of,
        }
        Ok(())
    }

    /// # Errors
    /// A batch with fewer samples than ranks: some ranks would have no sample.
    pub fn check_batch(&self, recipe: &Recipe) -> Result<(), Failure> {
        let ranks = self.rank.of;
        match recipe.train.batch {
            Batch::Samples(samples) if samples < ranks => Err(Failure::recipe(format!(
                "`train.batch = {samples}` is the batch of all ranks together, and there are {ranks} ranks"
            ))
            .hint(format!("`train.batch = {ranks}` gives every rank a sample; otherwise start fewer ranks"))),
            Batch::Samples(_) | Batch::Tokens(_) => Ok(()),
        }
    }

    /// Threads of this rank on a machine with this many cores.
    pub fn threads(&self, cores: usize) -> usize {
        (cores / self.local.of).max(1)
    }
}

fn too_few_gpus(found: usize, ranks: usize) -> Failure {
    let gpus = if found == 1 { "one GPU".to_owned() } else { format!("{found} GPUs") };
    Failure::device(format!("{ranks} ranks on this machine, which has {gpus}"))
        .hint(format!("start {found}, or have ranks share a GPU: `memory.device = \"cuda:0\"`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_spread_over_machines() {
        let world = RankLayout::planned(8, 2, true).unwrap();
        assert_eq!((world.rank.of, world.local.of, world.on_device), (8, 4, 1));
        assert_eq!(RankLayout::planned(4, 1, false).unwrap().on_device, 4);
        for (ranks, machines) in [(0, 1), (4, 0), (3, 2)] {
            assert_eq!(RankLayout::planned(ranks, machines, true).unwrap_err().exit_code(), 2);
        }
    }

    #[test]
    fn cores_are_divided() {
        let world = RankLayout { local: Rank { index: 1, of: 4 }, ..RankLayout::ALONE };
        assert_eq!([1, 4, 16, 18].map(|cores| world.threads(cores)), [1, 1, 4, 4]);
    }
}
