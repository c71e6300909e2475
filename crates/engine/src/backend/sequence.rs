//! Sequences of tokens: what is computed of them together, and what they leave behind in the layers.

use std::io::{self, Read, Write};
use std::ops::Range;

use smallvec::SmallVec;

use crate::backend::{Backend, LayerState, StateShape};
use crate::{LayerIdx, TokenId};

/// The most marks of a sequence: places that it can go back to, whatever its layers keep.
pub const MARKS: usize = 6;

/// Of those, the most that are pinned.
const PINS: usize = 3;

/// A sequence's part in a batch.
pub struct Sequence<'a> {
    /// What it remembers; the batch's tokens come after that.
    pub state: &'a mut SequenceState,
    /// Its rows in the batch.
    pub rows: Range<usize>,
}

/// Tokens computed together, of one sequence or of several.
pub struct Batch<'a> {
    /// `[rows]`
    pub tokens: &'a [TokenId],
    /// `[rows]` Each token's position in its sequence.
    pub positions: &'a [u32],
    /// Whose tokens they are.
    pub sequences: &'a mut [Sequence<'a>],
}

/// What the layers of a model remember of one sequence of tokens.
pub struct SequenceState {
    layers: Vec<Box<dyn LayerState>>,
    len: usize,
    /// Numbers of positions that all layers can go back to, ascending. Those above `len` are to be computed.
    marks: SmallVec<[usize; MARKS + 1]>,
    /// Marks that stay when there are too many. Some may not be marks yet, or no longer.
    pins: SmallVec<[usize; PINS]>,
}

impl SequenceState {
    /// A state before the first token, of layers of these shapes.
    pub(crate) fn new(shapes: &[StateShape], backend: &dyn Backend) -> SequenceState {
        let layers = shapes.iter().map(|&shape| backend.new_state(shape)).collect();
        SequenceState { layers, len: 0, marks: SmallVec::new(), pins: SmallVec::new() }
    }

    /// Positions remembered by all layers. While a batch is computed, the layers it has passed hold more.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// One layer's state, and the numbers of positions that it must be able to go back to.
    pub fn layer(&mut self, layer: LayerIdx) -> (&mut dyn LayerState, &[usize]) {
        (&mut *self.layers[layer.0], &self.marks)
    }

    /// Bytes that so many positions take in all layers.
    pub(crate) fn bytes_for(&self, len: usize) -> u64 {
        self.layers.iter().map(|layer| layer.bytes_for(len, &self.marks)).sum()
    }

    /// Bytes of what a fork shares for as long as both remember these positions.
    pub(crate) fn shared_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.shared_bytes()).sum()
    }

    /// The largest number of positions, not more than `len`, that all layers can go back to.
    pub(crate) fn reach(&self, mut len: usize) -> usize {
        loop {
            let reach = self.layers.iter().map(|layer| layer.reach(len)).min().unwrap_or(len);
            if reach == len {
                return len;
            }
            len = reach;
        }
    }

    /// Goes back to `len` positions, which must be within reach.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.layers.iter_mut().for_each(|layer| layer.truncate(len));
        self.marks.retain(|&mut mark| mark <= len);
        self.len = len;
    }

    /// Asks for a place to go back to after `len` positions, which are to be computed up to `end`. Where there are too
    /// many marks one goes: places close to the end stay close to each other, those far back get far apart.
    pub(crate) fn mark(&mut self, len: usize, end: usize) {
        if self.marks.last().is_some_and(|&last| last >= len) {
            return;
        }
        self.marks.push(len);
        if self.marks.len() > MARKS {
            let gap = |i: usize| self.marks[i + 1] - if i == 0 { 0 } else { self.marks[i - 1] };
            let sparseness = |i: usize| gap(i) as f64 / (end + 1 - self.marks[i]) as f64;
            let free = (0..MARKS).filter(|&i| !self.pins.contains(&self.marks[i]));
            let least = free.min_by(|&a, &b| sparseness(a).total_cmp(&sparseness(b)));
            self.marks.remove(least.expect("there are fewer pins than marks"));
        }
    }

    /// Has a mark after `len` positions, when they are computed, stay where others go. Of too many such wishes the first
    /// and the last ones count.
    pub(crate) fn pin(&mut self, len: usize) {
        if !self.pins.contains(&len) {
            if self.pins.len() == PINS {
                self.pins.remove(1);
            }
            self.pins.push(len);
        }
    }

    /// Gives up all places to go back to.
    pub(crate) fn forget_marks(&mut self) {
        self.marks.clear();
        self.layers.iter_mut().for_each(|layer| layer.settle(&[]));
    }

    /// All layers have computed up to `len`.
    pub(crate) fn settle(&mut self, len: usize) {
        self.len = len;
        self.layers.iter_mut().for_each(|layer| layer.settle(&self.marks));
    }

    pub(crate) fn fork(&self) -> SequenceState {
        let layers = self.layers.iter().map(|layer| layer.fork()).collect();
        let mut fork =
            SequenceState { layers, len: self.len, marks: self.marks.clone(), pins: self.pins.clone() };
        // The layers may hold more: of a batch that failed.
        fork.truncate(self.len);
        fork
    }

    pub(crate) fn save(&self, to: &mut dyn Write) -> io::Result<()> {
        self.layers.iter().try_for_each(|layer| layer.save(to))
    }

    /// Reads what [`save`](Self::save) wrote after `len` positions with these marks.
    pub(crate) fn load(&mut self, len: usize, marks: &[usize], from: &mut dyn Read) -> io::Result<()> {
        for layer in &mut self.layers {
            layer.load(len, from)?;
        }
        self.len = len;
        self.marks = marks.iter().copied().filter(|&mark| self.reach(mark) == mark).collect();
        Ok(())
    }

    pub(crate) fn marks(&self) -> &[usize] {
        &self.marks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_few_and_closest_near_the_end() {
        let mut state =
            SequenceState { layers: Vec::new(), len: 0, marks: SmallVec::new(), pins: SmallVec::new() };
        for end in (100..=10_000).step_by(100) {
            state.mark(end, end);
            assert!(state.marks.len() <= MARKS && state.marks.is_sorted());
            assert_eq!(state.marks.last(), Some(&end), "the newest is kept");
        }
        let gaps: Vec<usize> = state.marks.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps[0] > 4 * gaps[MARKS - 2], "{:?}", state.marks);
        // Back to a mark costs at most about as much as what is given up.
        for len in 1..=10_000 {
            let mark = state.marks.iter().rev().find(|&&mark| mark <= len).copied().unwrap_or(0);
            let (given_up, again) = (10_000 - len, len - mark);
            assert!(again <= 3 * given_up + 200, "{len}: {:?}", state.marks);
        }
        state.truncate(5_000);
        assert!(state.marks.iter().all(|&mark| mark <= 5_000));
    }

    #[test]
    fn a_pinned_mark_stays() {
        let mut state =
            SequenceState { layers: Vec::new(), len: 0, marks: SmallVec::new(), pins: SmallVec::new() };
        for pin in [300, 1200, 1300, 1400] {
            state.pin(pin);
        }
        for end in (100..=10_000).step_by(100) {
            state.mark(end, end);
        }
        assert!(state.marks.len() == MARKS && state.marks.is_sorted());
        assert!([300, 1300, 1400, 10_000].iter().all(|mark| state.marks.contains(mark)), "{:?}", state.marks);
    }
}
