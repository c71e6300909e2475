//! Sequences of tokens, their state in the layers, and the batches computed for them.

use std::io::{self, Read, Write};
use std::ops::Range;

use smallvec::SmallVec;

use super::state::Stateless;
use crate::backend::{Backend, LayerState, StateShape};
use crate::{LayerIdx, TokenId};

/// The most marks of a sequence: positions that every layer can go back to.
pub const MARKS: usize = 6;

/// The most pinned marks.
const PINS: usize = 3;

/// The part of a batch that belongs to one sequence.
pub struct Sequence<'a> {
    /// The sequence's state. The batch's tokens follow its positions.
    pub state: &'a mut SequenceState,
    /// Its rows of the batch.
    pub rows: Range<usize>,
}

/// Tokens computed together, from one sequence or from several.
pub struct Batch<'a> {
    /// `[rows]`
    pub tokens: &'a [TokenId],
    /// `[rows]` Each token's position in its sequence.
    pub positions: &'a [u32],
    /// `[rows, hidden]` The hidden states that the stage before computed; `None` in the first stage.
    pub stream: Option<&'a [f32]>,
    /// The sequences that the tokens belong to.
    pub sequences: &'a mut [Sequence<'a>],
}

/// The KV caches and recurrent states of one sequence in all layers.
pub struct SequenceState {
    /// The model's layer that is the first one here.
    first: usize,
    layers: Vec<Box<dyn LayerState>>,
    len: usize,
    /// Positions that all layers can go back to, ascending. Those above `len` are still to be computed.
    marks: SmallVec<[usize; MARKS + 1]>,
    /// Marks to keep when there are too many. Some may not be marks yet, or no longer.
    pins: SmallVec<[usize; PINS]>,
}

impl SequenceState {
    /// An empty state for layers of these shapes, from layer `first` on. Layers without a shape keep nothing.
    pub fn new(first: usize, shapes: &[Option<StateShape>], backend: &dyn Backend) -> SequenceState {
        let state = |shape: &Option<StateShape>| match *shape {
            Some(shape) => backend.new_state(shape),
            None => Box::new(Stateless),
        };
        let layers = shapes.iter().map(state).collect();
        SequenceState { first, layers, len: 0, marks: SmallVec::new(), pins: SmallVec::new() }
    }

    /// The number of positions in all layers. While a batch is computed, the layers that have computed it hold more.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no positions.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// One layer's state, and the positions that it must be able to go back to.
    pub fn layer(&mut self, layer: LayerIdx) -> (&mut dyn LayerState, &[usize]) {
        (&mut *self.layers[layer.0 - self.first], &self.marks)
    }

    /// Bytes of all layers for `len` positions.
    pub(crate) fn bytes_for(&self, len: usize) -> u64 {
        self.layers.iter().map(|layer| layer.bytes_for(len, &self.marks)).sum()
    }

    /// Bytes that a fork shares while both keep these positions.
    pub(crate) fn shared_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.shared_bytes()).sum()
    }

    /// The largest position, at most `len`, that all layers can go back to.
    pub(crate) fn reach(&self, mut len: usize) -> usize {
        loop {
            let reach = self.layers.iter().map(|layer| layer.reach(len)).min().unwrap_or(len);
            if reach == len {
                return len;
            }
            len = reach;
        }
    }

    /// Goes back to `len` positions, which all layers must be able to.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.layers.iter_mut().for_each(|layer| layer.truncate(len));
        self.marks.retain(|&mut mark| mark <= len);
        self.len = len;
    }

    /// Marks position `len` of a batch that ends at `end`. If there are too many marks, one is dropped: marks near
    /// the end stay close to each other, older ones get far apart.
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
            self.marks.remove(least.expect("there are more marks than pins"));
        }
    }

    /// Keeps the mark at `len`, once it is computed, when marks are dropped. Of too many pins, the first and the last
    /// ones count.
    pub(crate) fn pin(&mut self, len: usize) {
        if !self.pins.contains(&len) {
            if self.pins.len() == PINS {
                self.pins.remove(1);
            }
            self.pins.push(len);
        }
    }

    /// Drops all marks.
    pub(crate) fn forget_marks(&mut self) {
        self.marks.clear();
        self.layers.iter_mut().for_each(|layer| layer.settle(&[]));
    }

    /// Records that all layers have computed up to `len`.
    pub fn settle(&mut self, len: usize) {
        self.len = len;
        self.layers.iter_mut().for_each(|layer| layer.settle(&self.marks));
    }

    pub(crate) fn fork(&self) -> SequenceState {
        let layers = self.layers.iter().map(|layer| layer.fork()).collect();
        let SequenceState { first, len, .. } = *self;
        let mut fork =
            SequenceState { first, layers, len, marks: self.marks.clone(), pins: self.pins.clone() };
        // After a failed batch, layers may hold more.
        fork.truncate(self.len);
        fork
    }

    pub(crate) fn save(&self, to: &mut dyn Write) -> io::Result<()> {
        self.layers.iter().try_for_each(|layer| layer.save(to))
    }

    /// Reads what [`save`](Self::save) wrote, for `len` positions and these marks.
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

    fn without_layers() -> SequenceState {
        SequenceState { first: 0, layers: Vec::new(), len: 0, marks: SmallVec::new(), pins: SmallVec::new() }
    }

    #[test]
    fn marks_are_few_and_closest_near_the_end() {
        let mut state = without_layers();
        for end in (100..=10_000).step_by(100) {
            state.mark(end, end);
            assert!(state.marks.len() <= MARKS && state.marks.is_sorted());
            assert_eq!(state.marks.last(), Some(&end), "the newest is kept");
        }
        let gaps: Vec<usize> = state.marks.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps[0] > 4 * gaps[MARKS - 2], "{:?}", state.marks);
        // Recomputing from a mark costs at most about as much as the part that was dropped.
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
        let mut state = without_layers();
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
