//! Micro-batches of samples that an objective compares: packed together, or with the completions of other samples.
//!
//! Both answers of a pair are in one micro-batch. KTO measures its divergence on prompts with the completions of other rows.
//! Left out: what is computed with them (`smidgen_ir::objective`).

use crate::micro_batch::{MicroBatch, PackError, Packing};
use crate::tokens::{ReadSampleError, TokenSet};

impl Packing {
    /// Packs samples of a set into micro-batches of at most `micro_tokens`. Those that are compared stay together.
    pub fn pack_samples(
        &mut self,
        set: &TokenSet,
        samples: &[u32],
        micro_tokens: usize,
    ) -> Result<(), PackError> {
        let lengths = samples.iter().map(|sample| set.length(*sample as usize));
        self.pack_together(lengths, set.rows().together(), micro_tokens)
    }

    /// Like [`Packing::pack`], with this many samples at a time, which stay together.
    fn pack_together(
        &mut self,
        lengths: impl IntoIterator<Item = u32>,
        together: usize,
        micro_tokens: usize,
    ) -> Result<(), PackError> {
        if together == 1 {
            return self.pack(lengths, micro_tokens);
        }
        let lengths: Vec<u32> = lengths.into_iter().collect();
        self.pack(lengths.chunks(together).map(|group| group.iter().sum()), micro_tokens)?;
        let samples = |group: u32| (0..together as u32).map(move |member| group * together as u32 + member);
        self.positions = self.positions.iter().copied().flat_map(samples).collect();
        self.starts.iter_mut().for_each(|start| *start *= together as u32);
        Ok(())
    }
}

impl MicroBatch {
    /// Replaces the contents with prompts and completions of different samples: of each pair, the prompt of the first and
    /// the completion of the second. Longer ones are cut at `max_tokens`, whatever the plan has room for.
    pub fn fill_mismatched(
        &mut self,
        set: &TokenSet,
        pairs: &[(u32, u32)],
        max_tokens: usize,
    ) -> Result<(), ReadSampleError> {
        self.fill(set, [])?;
        let mut completion = Vec::new();
        for &(prompt, other) in pairs {
            let prompt_tokens = (set.length(prompt as usize) - set.supervised(prompt as usize)) as usize;
            let (first, answer_tokens) = (self.ids.len(), set.supervised(other as usize) as usize);
            set.read(prompt as usize, &mut self.ids, |_, _| {})?;
            self.ids.truncate(first + prompt_tokens);
            completion.clear();
            set.read(other as usize, &mut completion, |_, _| {})?;
            self.ids.extend_from_slice(&completion[completion.len() - answer_tokens..]);
            self.ids.truncate(first + max_tokens);
            for position in first + prompt_tokens..self.ids.len() {
                self.rows.push(position as i32 - 1);
                self.labels.push(self.ids[position]);
            }
            let length = self.ids.len() - first;
            self.positions.extend(0..length as i32);
            self.sample_of_token.extend(std::iter::repeat_n(other, length));
            self.segments.push(self.ids.len() as i32);
        }
        Ok(())
    }

    /// The first supervised row of each sample, and the end of the last.
    pub fn first_rows(&self) -> impl Iterator<Item = i32> + '_ {
        self.segments.iter().map(|start| self.rows.partition_point(|row| row < start) as i32)
    }
}
