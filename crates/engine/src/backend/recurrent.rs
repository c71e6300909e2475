//! Recurrent state: so many floats after each position that is kept.
//!
//! A state that was computed is never written to again. The next one is written beside it, so a batch that fails
//! leaves the state it started from, a fork shares it, and a mark costs no copy.

use std::any::Any;
use std::io::{self, Read, Write};
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use smallvec::SmallVec;

use super::pieces::{HostPieces, Pieces};
use super::{LayerState, damaged, read_number, write_number};
use crate::error::Result;

/// One layer's recurrent state of one sequence, wherever it is.
pub struct Recurrent<P: Pieces> {
    memory: P,
    /// The states that are kept, each with the number of positions it has seen, ascending. Before the first position
    /// the state is zero and not kept.
    kept: Vec<(usize, Arc<P::Piece>)>,
    /// The memory of a state that is no longer needed.
    spare: Option<Arc<P::Piece>>,
}

impl<P: Pieces> Recurrent<P> {
    /// None yet; `memory` makes pieces as large as a state.
    pub fn new(memory: P) -> Recurrent<P> {
        Recurrent { memory, kept: Vec::new(), spare: None }
    }

    /// Starts on the positions from `start` to `end`: where the state after `start` of them is, and where those after
    /// each marked one and after `end` are to be written, ascending. Nobody else has the latter.
    ///
    /// # Errors
    /// If there is no memory for them.
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
            to.push((*len, Arc::get_mut(piece).expect("nobody else has what is being written")));
        }
        Ok(Advance { from: before.last().map(|(_, piece)| &**piece), to })
    }

    fn recycle(&mut self, mut piece: Arc<P::Piece>) {
        if self.spare.is_none() && Arc::get_mut(&mut piece).is_some() {
            self.spare = Some(piece);
        }
    }
}

/// A state on its way.
pub struct Advance<'a, T> {
    /// Where it starts; `None` if it starts from zero.
    pub from: Option<&'a T>,
    /// Where it is written to, after how many positions.
    pub to: SmallVec<[(usize, &'a mut T); 4]>,
}

/// A recurrent state in the computer's memory.
pub type CpuRecurrent = Recurrent<HostPieces>;

impl CpuRecurrent {
    /// None yet.
    pub fn on_host(floats: usize) -> CpuRecurrent {
        Recurrent::new(HostPieces(floats * 4))
    }

    /// As [`advance`](Self::advance), in floats.
    ///
    /// # Errors
    /// If the system has no memory for them.
    pub fn advance_floats(&mut self, start: usize, end: usize, marks: &[usize]) -> Result<Floats<'_>> {
        let Advance { from, to } = self.advance(start, end, marks)?;
        let to = to.into_iter().map(|(len, piece)| (len, cast_slice_mut(piece)));
        Ok((from.map(|piece| cast_slice(piece)), to.collect()))
    }
}

/// The parts of an [`Advance`] on the host.
type Floats<'a> = (Option<&'a [f32]>, SmallVec<[(usize, &'a mut [f32]); 4]>);

impl<P: Pieces> LayerState for Recurrent<P> {
    fn len(&self) -> usize {
        self.kept.last().map_or(0, |(len, _)| *len)
    }

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
        // The last two, of which one may be spare, and the marked ones between.
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

    /// Adds the positions from the state's end to `end`, each of which adds its number to the only float.
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
    fn it_goes_back_to_marks_and_to_where_the_last_batch_started() {
        let mut state = CpuRecurrent::on_host(1);
        let marks = [10, 20];
        add(&mut state, 25, &marks);
        assert_eq!(value(&state), sum(25));
        state.settle(&marks);
        add(&mut state, 30, &marks);
        assert_eq!([30, 29, 24, 19, 9].map(|len| state.reach(len)), [30, 25, 20, 10, 0]);
        // As after a batch that failed.
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
    fn a_fork_goes_its_own_way() {
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
    fn what_was_saved_comes_back_and_something_else_does_not() {
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
