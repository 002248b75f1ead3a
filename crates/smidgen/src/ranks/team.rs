//! Small values that ranks exchange while they train: step times, stop requests, sums of scores.
//!
//! They are sent over the control link. All ranks call the same functions in the same order and get the same results,
//! so all ranks reach the same decisions without extra messages.
//! Left out: tensors (`smidgen_runtime::comm`).

use super::link::Link;
use crate::failure::Failure;
use serde::{Deserialize, Serialize};

/// The link of a rank to the others of its run.
#[derive(Debug)]
pub struct Team {
    link: Link,
}

/// What a rank reports after a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankReport {
    pub step: u64,
    pub seconds: f64,
    /// This rank was asked to stop.
    pub is_stopping: bool,
    /// Memory measured on its device (not the excess alone), if it is more than planned.
    pub exceeded_bytes: Option<u64>,
    pub device_bytes: Option<u64>,
}

/// The reports of all ranks after a step, combined.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TeamReport {
    pub slowest_s: f64,
    pub is_stopping: bool,
    /// The most memory measured on the device of a rank (not the excess alone), if a rank uses more than planned.
    pub exceeded_bytes: Option<u64>,
    /// Device memory of each rank, in the order of ranks.
    pub rank_bytes: Vec<u64>,
}

impl TeamReport {
    fn of(steps: &[RankReport]) -> TeamReport {
        TeamReport {
            slowest_s: steps.iter().map(|own| own.seconds).fold(0.0, f64::max),
            is_stopping: steps.iter().any(|own| own.is_stopping),
            exceeded_bytes: steps.iter().filter_map(|own| own.exceeded_bytes).max(),
            rank_bytes: steps.iter().filter_map(|own| own.device_bytes).collect(),
        }
    }
}

impl Team {
    pub fn new(link: Link) -> Team {
        Team { link }
    }

    pub fn link(&mut self) -> &mut Link {
        &mut self.link
    }

    pub fn into_link(self) -> Link {
        self.link
    }

    /// Exchanges reports after a step.
    pub fn end_step(&mut self, own: &RankReport) -> Result<TeamReport, Failure> {
        self.link.set_place(format!("step {}", own.step));
        let all: Vec<RankReport> = self.exchange(own)?;
        if let Some(rank) = all.iter().position(|other| other.step != own.step) {
            let other = all[rank].step;
            return Err(Failure::ranks(format!(
                "rank {rank} has ended step {other}, this rank step {}: the ranks are not in step",
                own.step
            )));
        }
        Ok(TeamReport::of(&all))
    }

    /// Adds numbers over all ranks, in the order of ranks.
    pub fn sum(&mut self, numbers: &mut [f64]) -> Result<(), Failure> {
        let all: Vec<Vec<f64>> = self.exchange(&numbers.to_vec())?;
        numbers.fill(0.0);
        for of_rank in all {
            numbers.iter_mut().zip(of_rank).for_each(|(sum, number)| *sum += number);
        }
        Ok(())
    }

    /// Replaces each number by the largest over all ranks.
    pub fn largest(&mut self, numbers: &mut [f32]) -> Result<(), Failure> {
        for of_rank in self.exchange(&numbers.to_vec())? {
            numbers
                .iter_mut()
                .zip(of_rank)
                .for_each(|(most, number): (&mut f32, f32)| *most = most.max(number));
        }
        Ok(())
    }

    /// The smallest number over all ranks, and the first rank that has it.
    pub fn smallest(&mut self, number: u64) -> Result<(u64, usize), Failure> {
        let all: Vec<u64> = self.exchange(&number)?;
        let smallest = all.iter().enumerate().min_by_key(|(rank, number)| (**number, *rank));
        Ok(smallest.map_or((number, 0), |(rank, number)| (*number, rank)))
    }

    /// The value of rank 0; those of other ranks are ignored.
    pub fn broadcast_first<T: Serialize + for<'a> Deserialize<'a>>(&mut self, own: &T) -> Result<T, Failure> {
        let text = serde_json::to_vec(own).map_err(Failure::ranks)?;
        serde_json::from_slice(&self.link.broadcast(text)?).map_err(Failure::ranks)
    }

    /// For a failure that all ranks have noticed: the message of the first rank that knows the cause, if one does.
    pub fn first_informed(&mut self, own: Failure, knows_more: bool) -> Result<Failure, Failure> {
        let all: Vec<(bool, String)> = self.exchange(&(knows_more, own.message.clone()))?;
        let informed = all.into_iter().enumerate().find(|(_, (knows_more, _))| *knows_more);
        Ok(match informed {
            Some((rank, (_, message))) if rank != self.link.rank() => {
                Failure::training(message).context(format!("rank {rank}"))
            }
            _ => own,
        })
    }

    /// The values of all ranks, in the order of ranks.
    pub(super) fn exchange<T: Serialize + for<'a> Deserialize<'a>>(
        &mut self,
        own: &T,
    ) -> Result<Vec<T>, Failure> {
        let text = serde_json::to_vec(own).map_err(Failure::ranks)?;
        let all = self.link.gather(&text)?;
        all.iter().map(|text| serde_json::from_slice(text).map_err(Failure::ranks)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_counts_and_one_is_enough_to_stop() {
        let step = |seconds, is_stopping, exceeded_bytes| RankReport {
            step: 3,
            seconds,
            is_stopping,
            exceeded_bytes,
            device_bytes: Some(7),
        };
        let together =
            TeamReport::of(&[step(0.5, false, None), step(2.0, true, Some(9)), step(1.0, false, Some(4))]);
        let expected = TeamReport {
            slowest_s: 2.0,
            is_stopping: true,
            exceeded_bytes: Some(9),
            rank_bytes: vec![7, 7, 7],
        };
        assert_eq!(together, expected);
        assert!(!TeamReport::of(&[step(0.5, false, None)]).is_stopping);
    }
}
