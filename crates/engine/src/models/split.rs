//! Splitting a model by layers into stages whose weights take about the same memory.

use std::ops::Range;

use super::blueprint::Blueprint;
use super::declared::Declared;
use crate::backend::Matrix;
use crate::error::{Error, Result};

impl Blueprint {
    /// The layers of each of `stages` stages, so that the largest stage is as small as possible. The embeddings count
    /// for the first stage, and the head for the last one.
    ///
    /// # Errors
    /// If there are no stages, or more than layers.
    pub fn split(&self, stages: usize) -> Result<Vec<Range<usize>>> {
        let all = self.span.all;
        if !(1..=all).contains(&stages) {
            return Err(Error::Invalid(format!(
                "a model of {all} layers cannot have {stages} stages; use 1 to {all}"
            )));
        }
        let dense = |weights: &[Declared]| weights.iter().map(Declared::bytes).sum::<u64>();
        let ends: Vec<usize> = self.starts.iter().copied().skip(1).chain([self.weights.len()]).collect();
        let layer = |l: usize| {
            let experts = self.experts[l].as_ref();
            let experts = experts.map_or(0, |layer| layer.expert_bytes() * layer.experts.len() as u64);
            dense(&self.weights[self.starts[l]..ends[l]]) + experts
        };
        let mut bytes: Vec<u64> = (0..all).map(layer).collect();
        let tables = &self.weights[..self.starts[0]];
        bytes[0] += dense(tables);
        // The last layer's weights include the head, unless the head is the embedding table.
        if self.model.head().is_some_and(|head| head.output == Matrix(0)) {
            bytes[all - 1] += dense(tables);
        }
        Ok(smallest_largest(&bytes, stages))
    }
}

/// Cuts a list into `parts` ranges, none of them empty, so that the largest sum is as small as possible.
fn smallest_largest(values: &[u64], parts: usize) -> Vec<Range<usize>> {
    let mut sums = vec![0];
    sums.extend(values.iter().scan(0, |sum, value| {
        *sum += value;
        Some(*sum)
    }));
    // For each length of the list's beginning: the largest sum of its best cut, and where its last range starts.
    let mut best: Vec<(u64, usize)> = sums.iter().map(|&sum| (sum, 0)).collect();
    let mut cuts = vec![best.clone()];
    for part in 1..parts {
        let next = (0..=values.len()).map(|end| {
            let cut = |start: usize| (best[start].0.max(sums[end] - sums[start]), start);
            (part..end).map(cut).min().unwrap_or((u64::MAX, 0))
        });
        best = next.collect();
        cuts.push(best.clone());
    }
    let mut end = values.len();
    let mut ranges: Vec<_> = cuts
        .iter()
        .rev()
        .map(|best| {
            let start = best[end].1;
            let range = start..end;
            end = start;
            range
        })
        .collect();
    ranges.reverse();
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_part_is_as_small_as_possible() {
        assert_eq!(smallest_largest(&[1, 1, 1, 1], 2), [0..2, 2..4]);
        assert_eq!(smallest_largest(&[9, 1, 1, 1], 2), [0..1, 1..4]);
        assert_eq!(smallest_largest(&[1, 1, 1, 9], 3), [0..1, 1..3, 3..4]);
        assert_eq!(smallest_largest(&[5, 6], 1).first(), Some(&(0..2)));
        assert_eq!(smallest_largest(&[0, 0, 7], 3), [0..1, 1..2, 2..3]);
        // Compared with every cut into three.
        let values = [3, 8, 1, 1, 7, 2, 9, 4, 4, 6];
        let sum = |range: Range<usize>| values[range].iter().sum::<u64>();
        let cuts = (1..9).flat_map(|a| (a + 1..10).map(move |b| [0..a, a..b, b..10]));
        let truth = cuts.map(|cut| cut.map(sum).into_iter().max().unwrap()).min().unwrap();
        let found = smallest_largest(&values, 3);
        assert_eq!(found.into_iter().map(sum).max().unwrap(), truth);
    }
}
