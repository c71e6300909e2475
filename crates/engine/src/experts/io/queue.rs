//! The reads that wait, and which piece is read next.
//!
//! Long reads are cut into pieces, so that a drive gets several requests at once even for one read. Each drive has
//! its own limit of pieces under way, so that a slow drive does not block the others. On each drive demand reads come
//! first; a prefetch starts only while no demand read waits or is under way.
//!
//! Threads [take](Queue::take) pieces and [finish](Queue::finish) them. A read is reported when its last piece is
//! finished.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::direct::is_aligned;
use super::{BLOCK, OnDone, Priority, Read, ReadId};
use crate::error::{Error, Result};
use crate::format::FileIdx;

/// The longest piece in bytes. Shorter pieces cost bandwidth. Longer ones give the drive too few requests: often a
/// layer misses one expert, which arrives sooner in many pieces than in three.
const PIECE: usize = 256 << 10;

/// The most prefetched pieces under way on a drive: what a demand read may have to wait for.
const PREFETCH_PLACES: usize = 4;

/// The drive of each file of a model.
pub(super) struct Drives {
    by_file: Vec<usize>,
    count: usize,
}

impl Drives {
    /// All files are on one drive.
    pub fn one() -> Drives {
        Drives { by_file: Vec::new(), count: 1 }
    }

    /// Drives by the device number of each file.
    pub fn by_device(devices: impl Iterator<Item = u64>) -> Drives {
        let mut seen = Vec::new();
        let drive = |device| {
            seen.iter().position(|&known| known == device).unwrap_or_else(|| {
                seen.push(device);
                seen.len() - 1
            })
        };
        let by_file = devices.map(drive).collect();
        Drives { by_file, count: seen.len().max(1) }
    }

    /// The number of drives, at least one.
    pub fn count(&self) -> usize {
        self.count
    }

    fn of(&self, file: FileIdx) -> usize {
        self.by_file.get(file.0).copied().unwrap_or(0)
    }
}

/// A part of a read that the drive gets as one request.
#[derive(Debug)]
pub(super) struct Piece {
    /// Index into [`QueueState::reads`].
    read: usize,
    pub file: FileIdx,
    pub offset: u64,
    pub to: *mut u8,
    pub len: usize,
    /// How many of its bytes must arrive.
    pub needed: usize,
}

// SAFETY: the submitter leaves the memory of a read to the reader's threads, whichever of them writes to it.
unsafe impl Send for Piece {}

/// Reads by priority, shared by submitters and the threads that process them.
pub(super) struct Queue {
    state: Mutex<QueueState>,
    /// Notified when a piece can be taken that could not be before.
    changed: Condvar,
    drives: Drives,
    on_done: OnDone,
}

impl Queue {
    /// A queue that has at most `places` pieces under way on each drive.
    pub fn new(drives: Drives, places: usize, on_done: OnDone) -> Queue {
        let lanes = (0..drives.count()).map(|_| Lane::new(places)).collect();
        let state = QueueState { lanes, reads: Vec::new(), free: Vec::new(), turn: 0, stopped: false };
        Queue { state: Mutex::new(state), changed: Condvar::new(), drives, on_done }
    }

    /// Adds reads at the end of the line of their priority.
    pub fn submit(&self, reads: &[Read], priority: Priority) {
        let mut state = self.lock();
        for read in reads {
            assert!(is_aligned(read.offset, read.to, read.len) && read.needed <= read.len, "{read:?}");
            state.add(read, self.drives.of(read.file), priority);
        }
    }

    /// Removes those of the reads that have not started; returns their ids.
    pub fn withdraw(&self, ids: &[ReadId]) -> Vec<ReadId> {
        let mut state = self.lock();
        let QueueState { lanes, reads, free, .. } = &mut *state;
        let mut withdrawn = Vec::new();
        for waiting in lanes.iter_mut().flat_map(|lane| &mut lane.waiting) {
            waiting.retain(|piece| {
                let read = &mut reads[piece.read];
                let stays = read.started || !ids.contains(&read.id);
                if !stays && read.end_piece() {
                    withdrawn.push(read.id);
                    free.push(piece.read);
                }
                stays
            });
        }
        withdrawn
    }

    /// Turns prefetches into demand reads.
    pub fn promote(&self, ids: &[ReadId]) {
        let mut state = self.lock();
        let QueueState { lanes, reads, .. } = &mut *state;
        for read in reads.iter_mut().filter(|read| read.unfinished > 0 && ids.contains(&read.id)) {
            let lane = &mut lanes[read.lane];
            lane.under_way[read.priority as usize] -= read.under_way;
            read.priority = Priority::Demand;
            lane.under_way[read.priority as usize] += read.under_way;
        }
        for [demand, prefetch] in lanes.iter_mut().map(|lane| &mut lane.waiting) {
            for _ in 0..prefetch.len() {
                let piece = prefetch.pop_front().expect("counted");
                let promoted = reads[piece.read].priority == Priority::Demand;
                if promoted { &mut *demand } else { &mut *prefetch }.push_back(piece);
            }
        }
    }

    /// The next piece; waits until there is one. `None` after the queue was stopped.
    pub fn take(&self) -> Option<Piece> {
        let mut state = self.lock();
        while !state.stopped {
            if let Some(piece) = state.next() {
                // Finishing a piece wakes no thread, because the thread that finishes takes the next piece. If more
                // pieces can be taken now, they are for a sleeping thread.
                if state.has_next() {
                    self.changed.notify_one();
                }
                return Some(piece);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        self.cancel_waiting();
        None
    }

    /// The next piece if there is one and the queue was not stopped.
    #[cfg(any(test, target_os = "linux"))]
    pub fn try_take(&self) -> Option<Piece> {
        let mut state = self.lock();
        if state.stopped { None } else { state.next() }
    }

    /// Ends a piece that was taken, and reports its read if this was the last piece.
    pub fn finish(&self, piece: Piece, result: Result<()>) {
        let ended = self.lock().finish(&piece, result);
        if let Some((id, result)) = ended {
            (self.on_done)(id, result);
        }
    }

    /// Hands out no more pieces.
    pub fn stop(&self) {
        self.lock().stopped = true;
    }

    /// Whether the queue was stopped.
    #[cfg(target_os = "linux")]
    pub fn is_stopped(&self) -> bool {
        self.lock().stopped
    }

    /// Reports reads that have not started as cancelled.
    pub fn cancel_waiting(&self) {
        loop {
            let Some(piece) = self.lock().pop_any() else { return };
            self.finish(piece, Err(Error::Cancelled));
        }
    }

    /// Wakes all threads that wait in [`Queue::take`].
    pub fn wake(&self) {
        // A thread that found nothing holds the lock until it sleeps, and `submit` has taken the lock since.
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        // No foreign code runs under the lock, so the state is consistent even after a panic elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct QueueState {
    /// One per drive.
    lanes: Vec<Lane>,
    /// Reads waiting or under way. Entries without unfinished pieces are free.
    reads: Vec<Progress>,
    free: Vec<usize>,
    /// The drive to look at first.
    turn: usize,
    stopped: bool,
}

/// The progress of a read.
struct Progress {
    id: ReadId,
    lane: usize,
    priority: Priority,
    /// Whether a piece of it was taken.
    started: bool,
    under_way: usize,
    /// The number of pieces that wait or are under way.
    unfinished: usize,
    /// The error of the first piece that failed.
    error: Option<Error>,
}

impl Progress {
    /// Counts a finished piece; returns whether it was the last.
    fn end_piece(&mut self) -> bool {
        self.unfinished -= 1;
        self.unfinished == 0
    }
}

impl QueueState {
    fn add(&mut self, read: &Read, lane: usize, priority: Priority) {
        let pieces = read.len.div_ceil(PIECE).max(1);
        let stride = read.len.div_ceil(pieces).next_multiple_of(BLOCK);
        let index = self.free.pop().unwrap_or(self.reads.len());
        let mut unfinished = 0;
        let mut start = 0;
        // Bytes after the last needed one get no piece of their own.
        while unfinished == 0 || start < read.needed {
            let len = stride.min(read.len - start);
            self.lanes[lane].waiting[priority as usize].push_back(Piece {
                read: index,
                file: read.file,
                offset: read.offset + start as u64,
                to: read.to.wrapping_add(start),
                len,
                needed: len.min(read.needed - start),
            });
            unfinished += 1;
            start += len;
        }
        let progress =
            Progress { id: read.id, lane, priority, started: false, under_way: 0, unfinished, error: None };
        if index == self.reads.len() {
            self.reads.push(progress);
        } else {
            self.reads[index] = progress;
        }
    }

    /// The next piece; drives take turns.
    fn next(&mut self) -> Option<Piece> {
        let lanes = self.lanes.len();
        let order = (0..lanes).map(|step| (self.turn + step) % lanes);
        let (lane, priority) = order.into_iter().find_map(|i| Some((i, self.lanes[i].may_start()?)))?;
        self.turn = lane + 1;
        self.start(lane, priority)
    }

    fn has_next(&self) -> bool {
        self.lanes.iter().any(|lane| lane.may_start().is_some())
    }

    /// Any waiting piece, whether or not its drive is at its limit.
    fn pop_any(&mut self) -> Option<Piece> {
        let filled = |lane: &Lane, priority: Priority| !lane.waiting[priority as usize].is_empty();
        let all = (0..self.lanes.len()).flat_map(|i| [(i, Priority::Demand), (i, Priority::Prefetch)]);
        let (lane, priority) = all.into_iter().find(|&(i, priority)| filled(&self.lanes[i], priority))?;
        self.start(lane, priority)
    }

    fn start(&mut self, lane: usize, priority: Priority) -> Option<Piece> {
        let lane = &mut self.lanes[lane];
        let piece = lane.waiting[priority as usize].pop_front()?;
        lane.under_way[priority as usize] += 1;
        let read = &mut self.reads[piece.read];
        read.started = true;
        read.under_way += 1;
        Some(piece)
    }

    fn finish(&mut self, piece: &Piece, result: Result<()>) -> Option<(ReadId, Result<()>)> {
        let read = &mut self.reads[piece.read];
        read.under_way -= 1;
        self.lanes[read.lane].under_way[read.priority as usize] -= 1;
        if let Err(error) = result {
            read.error.get_or_insert(error);
        }
        read.end_piece().then(|| {
            self.free.push(piece.read);
            (read.id, read.error.take().map_or(Ok(()), Err))
        })
    }
}

/// The waiting pieces of one drive. The arrays are indexed by [`Priority`].
struct Lane {
    waiting: [VecDeque<Piece>; 2],
    under_way: [usize; 2],
    places: usize,
}

impl Lane {
    fn new(places: usize) -> Lane {
        Lane { waiting: Default::default(), under_way: [0; 2], places }
    }

    /// The priority of the piece that may start now, if any.
    fn may_start(&self) -> Option<Priority> {
        let [demand, prefetch] = &self.waiting;
        let [demands, prefetches] = self.under_way;
        if !demand.is_empty() {
            (demands + prefetches < self.places).then_some(Priority::Demand)
        } else {
            let idle = demands == 0 && prefetches < PREFETCH_PLACES.min(self.places);
            (!prefetch.is_empty() && idle).then_some(Priority::Prefetch)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, channel};

    use super::*;
    use Priority::{Demand, Prefetch};

    type Reports = Receiver<(ReadId, Result<()>)>;

    fn queue(drives: Drives, places: usize) -> (Queue, Reports) {
        let (reports, received) = channel();
        (
            Queue::new(drives, places, Arc::new(move |id, result| reports.send((id, result)).unwrap())),
            received,
        )
    }

    /// A read of whole blocks. These tests never write to its memory.
    fn read(id: u64, file: usize, len: usize) -> Read {
        let (id, file, to) = (ReadId(id), FileIdx(file), std::ptr::without_provenance_mut(BLOCK));
        Read { id, file, offset: 0, to, len, needed: len }
    }

    /// Takes all pieces that can be taken; returns the ids of their reads and the pieces.
    fn take_all(queue: &Queue) -> (Vec<u64>, Vec<Piece>) {
        let pieces: Vec<_> = std::iter::from_fn(|| queue.try_take()).collect();
        let reads = pieces.iter().map(|piece| queue.lock().reads[piece.read].id.0).collect();
        (reads, pieces)
    }

    #[test]
    fn demand_overtakes_queued_prefetches() {
        let (queue, _reports) = queue(Drives::one(), 8);
        queue.submit(&(0..9).map(|id| read(id, 0, BLOCK)).collect::<Vec<_>>(), Prefetch);
        let (ids, mut prefetches) = take_all(&queue);
        assert_eq!(ids, [0, 1, 2, 3], "only a few at a time");
        queue.submit(&[read(100, 0, BLOCK), read(101, 0, BLOCK)], Demand);
        let (ids, mut demands) = take_all(&queue);
        assert_eq!(ids, [100, 101]);
        prefetches.drain(..).for_each(|piece| queue.finish(piece, Ok(())));
        queue.finish(demands.pop().unwrap(), Ok(()));
        assert!(queue.try_take().is_none(), "no prefetch while a demand read is under way");
        queue.finish(demands.pop().unwrap(), Ok(()));
        assert_eq!(take_all(&queue).0, [4, 5, 6, 7]);
    }

    #[test]
    fn long_reads_are_cut_and_reported_once() {
        let (queue, reports) = queue(Drives::one(), 16);
        let whole = Read { needed: 5 * PIECE / 2 + 1, ..read(7, 0, 5 * PIECE / 2 + BLOCK) };
        queue.submit(&[whole], Demand);
        let (_, pieces) = take_all(&queue);
        assert_eq!(pieces.len(), 3);
        let mut end = 0;
        for piece in &pieces {
            assert_eq!((piece.offset, piece.to), (end as u64, whole.to.wrapping_add(end)));
            assert!(is_aligned(piece.offset, piece.to, piece.len) && piece.len <= PIECE);
            end += piece.len;
        }
        assert_eq!(end, whole.len);
        assert_eq!(pieces.iter().map(|piece| piece.needed).sum::<usize>(), whole.needed);
        for (i, piece) in pieces.into_iter().enumerate() {
            assert!(reports.try_recv().is_err());
            let failed = Error::Backend(format!("piece {i}"));
            queue.finish(piece, if i == 0 { Ok(()) } else { Err(failed) });
        }
        let (id, result) = reports.try_recv().unwrap();
        assert_eq!((id, result.unwrap_err().to_string()), (ReadId(7), "piece 1".into()));
        assert!(reports.try_recv().is_err());
    }

    #[test]
    fn what_has_not_started_can_be_withdrawn() {
        let (queue, reports) = queue(Drives::one(), 8);
        queue.submit(&[read(1, 0, 6 * PIECE), read(2, 0, 2 * PIECE), read(3, 0, BLOCK)], Prefetch);
        let (_, pieces) = take_all(&queue);
        assert_eq!(queue.withdraw(&[ReadId(1), ReadId(2), ReadId(9)]), [ReadId(2)]);
        pieces.into_iter().for_each(|piece| queue.finish(piece, Ok(())));
        let (ids, pieces) = take_all(&queue);
        assert_eq!(ids, [1, 1, 3]);
        pieces.into_iter().for_each(|piece| queue.finish(piece, Ok(())));
        assert_eq!(reports.try_iter().map(|(id, _)| id).collect::<Vec<_>>(), [ReadId(1), ReadId(3)]);
    }

    #[test]
    fn promoted_prefetches_are_demand_reads() {
        let (queue, reports) = queue(Drives::one(), 8);
        queue.submit(&[read(1, 0, 6 * PIECE), read(2, 0, BLOCK), read(3, 0, BLOCK)], Prefetch);
        let (ids, started) = take_all(&queue);
        assert_eq!(ids, [1; 4]);
        queue.promote(&[ReadId(1), ReadId(3), ReadId(9)]);
        let (ids, rest) = take_all(&queue);
        assert_eq!(ids, [1, 1, 3]);
        for piece in started.into_iter().chain(rest) {
            assert!(queue.try_take().is_none(), "the prefetch waits for all of them");
            queue.finish(piece, Ok(()));
        }
        assert_eq!(take_all(&queue).0, [2]);
        assert_eq!(reports.try_iter().count(), 2);
    }

    #[test]
    fn a_slow_drive_does_not_block_another() {
        let (queue, _reports) = queue(Drives::by_device([7, 9, 7].into_iter()), 2);
        let on_first: Vec<_> = (0..5).map(|id| read(id, 2, BLOCK)).collect();
        queue.submit(&on_first, Demand);
        assert_eq!(take_all(&queue).0, [0, 1]);
        queue.submit(&[read(10, 0, BLOCK), read(11, 1, BLOCK)], Demand);
        assert_eq!(take_all(&queue).0, [11]);
    }

    #[test]
    fn stopping_cancels_what_waits() {
        let (queue, reports) = queue(Drives::one(), 1);
        queue.submit(&[read(1, 0, BLOCK), read(2, 0, 3 * PIECE)], Demand);
        let started = queue.take().unwrap();
        queue.stop();
        assert!(queue.take().is_none());
        assert!(matches!(reports.try_recv(), Ok((ReadId(2), Err(Error::Cancelled)))));
        queue.finish(started, Ok(()));
        assert!(matches!(reports.try_recv(), Ok((ReadId(1), Ok(())))));
    }
}
