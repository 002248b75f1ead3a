//! Finds ranks that still send beats but make no progress.
//!
//! Every rank counts its tensor exchanges and sends the count with its beats. A rank that stays behind the others for
//! longer than a limit keeps them waiting: a hung GPU or file system, or a deadlocked thread. If all ranks have reached
//! the same exchange and none completes it, the exchange itself hangs.
//! Rank 0 receives the beats of all ranks, so it decides.

use super::wire::Loss;
use std::time::{Duration, Instant};

/// The tensor exchanges of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub reached: u64,
    pub done: u64,
}

#[derive(Debug)]
pub struct Standstill {
    limit: Duration,
    /// For each rank that is behind: the exchange that it has reached, and since when it is behind.
    behind: Vec<Option<(u64, Instant)>>,
    /// The exchange that all ranks have reached and none has completed, and since when.
    stalled: Option<(u64, Instant)>,
}

impl Standstill {
    pub fn new(limit: Duration) -> Standstill {
        Standstill { limit, behind: Vec::new(), stalled: None }
    }

    /// Updates the counts, which are in the order of ranks. Returns the rank that has kept the others waiting for too
    /// long, if there is one.
    pub fn look(&mut self, counts: &[Counts], now: Instant) -> Option<(usize, Loss)> {
        let most = counts.iter().map(|counts| counts.reached).max()?;
        self.behind.resize(counts.len(), None);
        for (behind, counts) in self.behind.iter_mut().zip(counts) {
            *behind = match *behind {
                _ if counts.reached == most => None,
                Some((reached, since)) if reached == counts.reached => Some((reached, since)),
                _ => Some((counts.reached, now)),
            };
        }
        let is_stalled = counts.iter().all(|counts| counts.reached == most && counts.done < most);
        self.stalled = match self.stalled {
            _ if !is_stalled => None,
            Some((reached, since)) if reached == most => Some((reached, since)),
            _ => Some((most, now)),
        };
        let waited = |since: Instant| now.saturating_duration_since(since);
        let too_long = |since: &(u64, Instant)| waited(since.1) > self.limit;
        let late = self.behind.iter().position(|behind| behind.as_ref().is_some_and(too_long));
        let seconds = |since: Instant| waited(since).as_secs();
        match (late, self.stalled.filter(too_long)) {
            (Some(rank), _) => {
                Some((rank, Loss::Behind(self.behind[rank].map_or(0, |(_, since)| seconds(since)))))
            }
            (None, Some((_, since))) => Some((0, Loss::Stalled(seconds(since)))),
            (None, None) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn counts(all: &[(u64, u64)]) -> Vec<Counts> {
        all.iter().map(|(reached, done)| Counts { reached: *reached, done: *done }).collect()
    }

    /// The second and the result of the first loss, if ranks report these counts each second.
    fn found(seconds: impl Iterator<Item = Vec<(u64, u64)>>) -> Option<(u64, (usize, Loss))> {
        let (start, mut standstill) = (Instant::now(), Standstill::new(LIMIT));
        seconds.zip(0..).find_map(|(all, second)| {
            let now = start + Duration::from_secs(second);
            standstill.look(&counts(&all), now).map(|found| (second, found))
        })
    }

    #[test]
    fn the_rank_that_the_others_wait_for_is_named() {
        let hung = (0..60).map(|_| vec![(5, 4), (4, 4), (5, 4)]);
        assert_eq!(found(hung), Some((11, (1, Loss::Behind(11)))));
    }

    #[test]
    fn a_rank_that_comes_late_is_not_stuck() {
        // Each exchange is reached nine seconds late.
        let late = (0..100).map(|second| vec![(second / 9 + 1, second / 9), (second / 9, second / 9)]);
        assert_eq!(found(late), None);
        // No rank exchanges anything for a minute, and then one is first.
        let pause = (0..69).map(|second| if second < 60 { vec![(3, 3); 2] } else { vec![(4, 3), (3, 3)] });
        assert_eq!(found(pause), None);
    }

    #[test]
    fn an_exchange_that_no_rank_completes_is_found() {
        let stalled = (0..60).map(|_| vec![(5, 4), (5, 4)]);
        assert_eq!(found(stalled), Some((11, (0, Loss::Stalled(11)))));
        let moving = (0..60).map(|second| vec![(second, second - second % 2); 2]);
        assert_eq!(found(moving), None);
        assert_eq!(found((0..60).map(|_| vec![(5, 5), (5, 5)])), None, "all ranks compute");
    }
}
