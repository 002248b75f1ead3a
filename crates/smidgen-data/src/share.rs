//! The samples of a step, spread over ranks.
//!
//! Every rank computes the same division from the lengths alone. Samples are assigned from the longest to the shortest,
//! each to the rank that has the fewest tokens so far, so that ranks have about equal work; within a rank samples keep
//! the order of the step. If a step has fewer samples than ranks, some ranks get none.

/// The shares of a step; buffers are reused.
#[derive(Debug, Default)]
pub struct Shares {
    samples: Vec<Vec<u32>>,
    tokens: Vec<u64>,
    longest_first: Vec<u32>,
    rank_of: Vec<u32>,
}

impl Shares {
    /// Divides samples with these lengths among `ranks`.
    pub fn divide(&mut self, samples: &[u32], length: impl Fn(u32) -> u32, ranks: usize) {
        self.samples.resize_with(ranks, Vec::new);
        self.samples.iter_mut().for_each(Vec::clear);
        if ranks == 1 {
            self.samples[0].extend_from_slice(samples);
            return;
        }
        self.tokens.clear();
        self.tokens.resize(ranks, 0);
        self.longest_first.clear();
        self.longest_first.extend(0..samples.len() as u32);
        let length_at = |position: u32| length(samples[position as usize]);
        self.longest_first.sort_unstable_by_key(|&position| (u32::MAX - length_at(position), position));
        self.rank_of.clear();
        self.rank_of.resize(samples.len(), 0);
        for &position in &self.longest_first {
            let fewest = self.tokens.iter().enumerate().min_by_key(|(rank, tokens)| (**tokens, *rank));
            let rank = fewest.map_or(0, |(rank, _)| rank);
            self.tokens[rank] += u64::from(length_at(position));
            self.rank_of[position as usize] = rank as u32;
        }
        for (sample, rank) in samples.iter().zip(&self.rank_of) {
            self.samples[*rank as usize].push(*sample);
        }
    }

    /// The samples of a rank.
    pub fn of(&self, rank: usize) -> &[u32] {
        &self.samples[rank]
    }

    pub fn all(&self) -> impl ExactSizeIterator<Item = &[u32]> {
        self.samples.iter().map(Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn divided(lengths: &[u32], ranks: usize) -> Vec<Vec<u32>> {
        let samples: Vec<u32> = (0..lengths.len() as u32).collect();
        let mut shares = Shares::default();
        shares.divide(&samples, |sample| lengths[sample as usize], ranks);
        shares.all().map(<[u32]>::to_vec).collect()
    }

    #[test]
    fn by_hand() {
        assert_eq!(divided(&[5, 9, 5, 1], 1), [vec![0, 1, 2, 3]]);
        assert_eq!(divided(&[5, 9, 5, 1], 2), [vec![1, 3], vec![0, 2]]);
        assert_eq!(divided(&[7, 7], 3), [vec![0], vec![1], vec![]]);
        assert_eq!(divided(&[], 2), [vec![], vec![]] as [Vec<u32>; 2]);
    }

    proptest! {
        #[test]
        fn every_sample_has_one_rank_and_no_rank_much_more(
            lengths in proptest::collection::vec(1u32..2000, 0..64),
            ranks in 1usize..9,
        ) {
            let shares = divided(&lengths, ranks);
            let mut all: Vec<u32> = shares.iter().flatten().copied().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..lengths.len() as u32).collect::<Vec<_>>());
            let tokens: Vec<u64> =
                shares.iter().map(|own| own.iter().map(|sample| u64::from(lengths[*sample as usize])).sum()).collect();
            let longest = u64::from(lengths.iter().copied().max().unwrap_or(0));
            prop_assert!(tokens.iter().max().unwrap() - tokens.iter().min().unwrap() <= longest);
            prop_assert!(shares.iter().all(|own| own.is_sorted()));
        }
    }
}
