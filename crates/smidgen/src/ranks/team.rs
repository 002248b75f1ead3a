//! A rank among its team: what training asks of the others beside its tensors.
//!
//! Small numbers travel over the control link: after each step the time of the slowest and whether anybody wants to stop,
//! sums of scores, the rows that each rank has seen. All ranks call the same functions in the same order and get the same
//! answers, so they decide alike without being told.

use super::link::Link;
use crate::failure::Failure;
use serde::{Deserialize, Serialize};

/// The link of a rank to the others of its run.
#[derive(Debug)]
pub struct Team {
    link: Link,
}

/// What a rank has to say after a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OwnStep {
    pub step: u64,
    pub seconds: f64,
    /// Whether this rank was asked to stop.
    pub is_stopping: bool,
    /// Its memory, if that is above the plan.
    pub exceeded_bytes: Option<u64>,
    pub device_bytes: Option<u64>,
}

/// What all ranks together have to say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Together {
    pub slowest_s: f64,
    pub is_stopping: bool,
    /// The most by which a rank is above its plan.
    pub exceeded_bytes: Option<u64>,
    /// Memory of each rank, in their order.
    pub rank_bytes: Vec<u64>,
}

impl Together {
    fn of(steps: &[OwnStep]) -> Together {
        Together {
            slowest_s: steps.iter().map(|own| own.seconds).fold(0.0, f64::max),
            is_stopping: steps.iter().any(|own| own.is_stopping),
            exceeded_bytes: steps.iter().filter_map(|own| own.exceeded_bytes).max(),
            rank_bytes: steps.iter().filter_map(|own| own.device_bytes).collect(),
        }
    }
}

impl Team {
    pub fn over(link: Link) -> Team {
        Team { link }
    }

    pub fn link(&mut self) -> &mut Link {
        &mut self.link
    }

    pub fn into_link(self) -> Link {
        self.link
    }

    /// Compares a step with those of the others.
    pub fn end_step(&mut self, own: &OwnStep) -> Result<Together, Failure> {
        self.link.set_place(format!("step {}", own.step));
        let all: Vec<OwnStep> = self.exchange(own)?;
        if let Some(rank) = all.iter().position(|other| other.step != own.step) {
            let other = all[rank].step;
            return Err(Failure::ranks(format!(
                "rank {rank} has ended step {other}, this rank step {}: the ranks are not in step",
                own.step
            )));
        }
        Ok(Together::of(&all))
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

    /// The largest of each number over all ranks.
    pub fn largest(&mut self, numbers: &mut [f32]) -> Result<(), Failure> {
        for of_rank in self.exchange(&numbers.to_vec())? {
            numbers
                .iter_mut()
                .zip(of_rank)
                .for_each(|(most, number): (&mut f32, f32)| *most = most.max(number));
        }
        Ok(())
    }

    /// The smallest of each number over all ranks, and whose it is.
    pub fn smallest(&mut self, number: u64) -> Result<(u64, usize), Failure> {
        let all: Vec<u64> = self.exchange(&number)?;
        let smallest = all.iter().enumerate().min_by_key(|(rank, number)| (**number, *rank));
        Ok(smallest.map_or((number, 0), |(rank, number)| (*number, rank)))
    }

    /// What rank 0 says; the others' own is dropped.
    pub fn of_first<T: Serialize + for<'a> Deserialize<'a>>(&mut self, own: &T) -> Result<T, Failure> {
        let text = serde_json::to_vec(own).map_err(Failure::ranks)?;
        serde_json::from_slice(&self.link.broadcast(text)?).map_err(Failure::ranks)
    }

    /// Of a failure that all ranks have noticed, the message of the first that knows more.
    pub fn most_telling(&mut self, own: Failure, knows_more: bool) -> Result<Failure, Failure> {
        let all: Vec<(bool, String)> = self.exchange(&(knows_more, own.message.clone()))?;
        let telling = all.into_iter().enumerate().find(|(_, (knows_more, _))| *knows_more);
        Ok(match telling {
            Some((rank, (_, message))) if rank != self.link.rank() => {
                Failure::training(message).context(format!("rank {rank}"))
            }
            _ => own,
        })
    }

    /// What every rank says, in the order of ranks.
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
        let step = |seconds, is_stopping, exceeded_bytes| OwnStep {
            step: 3,
            seconds,
            is_stopping,
            exceeded_bytes,
            device_bytes: Some(7),
        };
        let together =
            Together::of(&[step(0.5, false, None), step(2.0, true, Some(9)), step(1.0, false, Some(4))]);
        let expected = Together {
            slowest_s: 2.0,
            is_stopping: true,
            exceeded_bytes: Some(9),
            rank_bytes: vec![7, 7, 7],
        };
        assert_eq!(together, expected);
        assert!(!Together::of(&[step(0.5, false, None)]).is_stopping);
    }
}
