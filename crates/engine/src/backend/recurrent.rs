//! The recurrent state of a layer: a fixed number of floats for each position that is kept.
//!
//! A finished state is never written to again. The next one is written beside it, so a failed batch leaves the state
//! that it started from, forks share states, and a mark costs no copy.

use std::any::Any;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use smallvec::SmallVec;

use super::pieces::{HostPieces, Pieces};
use super::{Batch, LayerState, damaged, read_number, write_number};
use crate::LayerIdx;
use crate::error::Result;

/// One layer's recurrent states of one sequence, in the memory of any device.
pub struct Recurrent<P: Pieces> {
    memory: P,
    /// The kept states in ascending order, each with the number of positions that it has seen. The state before the
    /// first position is zero and not stored.
    kept: Vec<(usize, Arc<P::Piece>)>,
    /// The memory of a state that is no longer needed, for reuse.
    spare: Option<Arc<P::Piece>>,
}

impl<P: Pieces> Recurrent<P> {
    /// No positions yet. `memory` makes pieces of the size of a state.
    pub fn new(memory: P) -> Recurrent<P> {
        Recurrent { memory, kept: Vec::new(), spare: None }
    }

    /// Prepares to compute the positions from `start` to `end`: returns the state after `start`, and the states to
    /// write after each mark and after `end`, in ascending order. The latter are not shared.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn advance(&mut self, start: usize, end: usize, marks: &[usize]) -> Result<Advance<'_, P::Piece>> {
        self.truncate(start);
        assert_eq!(self.len(), start, "a state is computed from the one before");
        let ends = marks.iter().copied().filter(|&mark| start < mark && mark < end).chain([end]);
        let first = self.kept.len();
        for len in ends {
            let piece = match self.spare.take() {
                Some(piece) => piece,
                None => Arc::new(self.memory.make()?),
            };
            self.kept.push((len, piece));
        }
        let (before, after) = self.kept.split_at_mut(first);
        let mut to = SmallVec::new();
        for (len, piece) in after {
            to.push((*len, Arc::get_mut(piece).expect("a state being written is not shared")));
        }
        Ok(Advance { from: before.last().map(|(_, piece)| &**piece), to })
    }

    /// The number of positions.
    fn len(&self) -> usize {
        self.kept.last().map_or(0, |(len, _)| *len)
    }

    fn recycle(&mut self, mut piece: Arc<P::Piece>) {
        if self.spare.is_none() && Arc::get_mut(&mut piece).is_some() {
            self.spare = Some(piece);
        }
    }
}

/// The states that a batch reads and writes.
pub struct Advance<'a, T> {
    /// The state to start from; `None` means zero.
    pub from: Option<&'a T>,
    /// The states to write, each with the number of positions that it has seen.
    pub to: SmallVec<[(usize, &'a mut T); 4]>,
}

/// Recurrent states in RAM.
pub type CpuRecurrent = Recurrent<HostPieces>;

impl CpuRecurrent {
    /// No positions yet.
    pub fn on_host(floats: usize) -> CpuRecurrent {
        Recurrent::new(HostPieces(floats * 4))
    }

    /// Like [`advance`](Self::advance), with the states as floats.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn advance_floats(&mut self, start: usize, end: usize, marks: &[usize]) -> Result<Floats<'_>> {
        let Advance { from, to } = self.advance(start, end, marks)?;
        let to = to.into_iter().map(|(len, piece)| (len, cast_slice_mut(piece)));
        Ok((from.map(|piece| cast_slice(piece)), to.collect()))
    }
}

/// Calls `compute` for the tokens of a batch between positions whose states a layer keeps, in order: with the number
/// of tokens of the sequence before them, their rows, the state before them, and the state to write.
///
/// # Errors
/// If there is not enough memory.
pub fn advance_batch(
    batch: &mut Batch<'_>,
    layer: LayerIdx,
    mut compute: impl FnMut(usize, Range<usize>, Option<&[f32]>, &mut [f32]),
) -> Result<()> {
    for sequence in batch.sequences.iter_mut() {
        let mut start = sequence.state.len();
        let (state, marks) = sequence.state.layer(layer);
        let state =
            state.as_any_mut().downcast_mut::<CpuRecurrent>().expect("the state was made by this backend");
        let mut row = sequence.rows.start;
        let (mut before, to) = state.advance_floats(start, start + sequence.rows.len(), marks)?;
        for (end, after) in to {
            let rows = row..row + end - start;
            compute(start, rows.clone(), before, after);
            before = Some(after);
            (start, row) = (end, rows.end);
        }
    }
    Ok(())
}

/// The parts of an [`Advance`] in RAM.
type Floats<'a> = (Option<&'a [f32]>, SmallVec<[(usize, &'a mut [f32]); 4]>);

impl<P: Pieces> LayerState for Recurrent<P> {
    fn reach(&self, len: usize) -> usize {
        self.kept.iter().rev().map(|(kept, _)| *kept).find(|&kept| kept <= len).unwrap_or(0)
    }

    fn truncate(&mut self, len: usize) {
        while self.kept.last().is_some_and(|(kept, _)| *kept > len) {
            let (_, piece) = self.kept.pop().expect("there is a last one");
            self.recycle(piece);
        }
    }

    fn settle(&mut self, marks: &[usize]) {
        let end = self.len();
        for i in (0..self.kept.len()).rev() {
            let len = self.kept[i].0;
            if len != end && !marks.contains(&len) {
                let (_, piece) = self.kept.remove(i);
                self.recycle(piece);
            }
        }
    }

    fn bytes_for(&self, len: usize, marks: &[usize]) -> u64 {
        // The last two states, of which one may be spare, and the marked ones before them.
        let marked = marks.iter().filter(|&&mark| mark < len).count();
        if len == 0 { 0 } else { (2 + marked) as u64 * self.memory.bytes() }
    }

    fn fork(&self) -> Box<dyn LayerState> {
        Box::new(Recurrent { memory: self.memory.clone(), kept: self.kept.clone(), spare: None })
    }

    fn shared_bytes(&self) -> u64 {
        0
    }

    fn save(&self, to: &mut dyn Write) -> io::Result<()> {
        write_number(to, self.kept.len())?;
        for (len, piece) in &self.kept {
            write_number(to, *len)?;
            self.memory.save(piece, to)?;
        }
        Ok(())
    }

    fn load(&mut self, len: usize, from: &mut dyn Read) -> io::Result<()> {
        for _ in 0..read_number(from)? {
            let kept = read_number(from)?;
            if kept <= self.len() || kept > len {
                return Err(damaged());
            }
            self.kept.push((kept, Arc::new(self.memory.load(from)?)));
        }
        if self.len() == len { Ok(()) } else { Err(damaged()) }
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds the positions up to `end`, each of which adds its number to the state's only float.
    fn add(state: &mut CpuRecurrent, end: usize, marks: &[usize]) {
        let start = state.len();
        let (from, to) = state.advance_floats(start, end, marks).unwrap();
        let (mut value, mut position) = (from.map_or(0.0, |from| from[0]), start);
        for (len, to) in to {
            while position < len {
                value += position as f32;
                position += 1;
            }
            to[0] = value;
        }
    }

    fn value(state: &CpuRecurrent) -> f32 {
        state.kept.last().map_or(0.0, |(_, piece)| cast_slice(piece)[0])
    }

    /// The sum of all positions before `len`.
    fn sum(len: usize) -> f32 {
        (0..len).sum::<usize>() as f32
    }

    #[test]
    fn a_state_can_be_rewound_to_marks_and_to_the_start_of_the_last_batch() {
        let mut state = CpuRecurrent::on_host(1);
        let marks = [10, 20];
        add(&mut state, 25, &marks);
        assert_eq!(value(&state), sum(25));
        state.settle(&marks);
        add(&mut state, 30, &marks);
        assert_eq!([30, 29, 24, 19, 9].map(|len| state.reach(len)), [30, 25, 20, 10, 0]);
        // As after a failed batch.
        state.truncate(25);
        assert_eq!((state.len(), value(&state)), (25, sum(25)));
        add(&mut state, 31, &marks);
        state.settle(&marks);
        assert_eq!((value(&state), state.reach(30)), (sum(31), 20));
        state.truncate(20);
        assert_eq!(value(&state), sum(20));
        state.settle(&[]);
        assert_eq!(state.reach(19), 0);
        state.truncate(0);
        add(&mut state, 3, &[]);
        assert_eq!(value(&state), sum(3));
    }

    #[test]
    fn a_fork_does_not_change_the_original() {
        let mut state = CpuRecurrent::on_host(1);
        add(&mut state, 5, &[]);
        let mut fork = state.fork();
        let fork = fork.as_any_mut().downcast_mut::<CpuRecurrent>().unwrap();
        for end in 6..9 {
            add(&mut state, end, &[]);
            state.settle(&[]);
        }
        add(fork, 6, &[]);
        assert_eq!((value(fork), value(&state)), (sum(6), sum(8)));
        assert_eq!(fork.reach(5), 5);
    }

    #[test]
    fn a_saved_state_is_loaded_and_a_wrong_one_is_refused() {
        let mut state = CpuRecurrent::on_host(2);
        add(&mut state, 25, &[10]);
        let mut saved = Vec::new();
        state.save(&mut saved).unwrap();
        let mut loaded = CpuRecurrent::on_host(2);
        loaded.load(25, &mut &saved[..]).unwrap();
        assert_eq!((loaded.len(), loaded.reach(24), value(&loaded)), (25, 10, sum(25)));
        assert!(CpuRecurrent::on_host(2).load(24, &mut &saved[..]).is_err());
        assert!(CpuRecurrent::on_host(2).load(26, &mut &saved[..]).is_err());
        for cut in 0..saved.len() {
            assert!(CpuRecurrent::on_host(2).load(25, &mut &saved[..cut]).is_err());
        }
    }
}
