//! The queue of requests that wait for a place.

use std::collections::{BTreeMap, VecDeque};

use super::member::{Asked, Member};
use crate::blocks::Cancel;

/// A request that waits for a place.
pub enum Waiting {
    New(Box<Asked>),
    /// It gave its memory to others. Its text is kept, but must be computed again.
    Parked(Box<Member>),
}

impl Waiting {
    fn cancel(&self) -> &Cancel {
        match self {
            Waiting::New(asked) => &asked.cancel,
            Waiting::Parked(member) => &member.cancel,
        }
    }

    fn number(&self) -> u64 {
        match self {
            Waiting::New(asked) => asked.number,
            Waiting::Parked(member) => member.number,
        }
    }

    fn client(&self) -> u128 {
        match self {
            Waiting::New(asked) => asked.request.client.number,
            Waiting::Parked(member) => member.client.number,
        }
    }
}

/// Waiting requests: a queue for each client, in order of arrival. No queue is empty.
#[derive(Default)]
pub struct Queue(BTreeMap<u128, VecDeque<Waiting>>);

impl Queue {
    pub fn len(&self) -> usize {
        self.0.values().map(VecDeque::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a request to its client's queue, before those that came later.
    pub fn insert(&mut self, waiting: Waiting) {
        let line = self.0.entry(waiting.client()).or_default();
        let place = line.partition_point(|other| other.number() < waiting.number());
        line.insert(place, waiting);
    }

    /// Takes out the next request. It belongs to the client that has the fewest places, and fewer than `share`; of
    /// several such clients, to the one whose request came first.
    pub fn next(&mut self, places: impl Fn(u128) -> usize, share: usize) -> Option<Waiting> {
        let lines = self.0.iter().map(|(&client, line)| (places(client), line[0].number(), client));
        let (_, _, client) = lines.filter(|(held, ..)| *held < share).min()?;
        let line = self.0.get_mut(&client)?;
        let next = line.pop_front();
        if line.is_empty() {
            self.0.remove(&client);
        }
        next
    }

    /// Takes out the cancelled requests.
    pub fn take_cancelled(&mut self) -> Vec<Waiting> {
        let mut cancelled = Vec::new();
        for line in self.0.values_mut() {
            while let Some(i) = line.iter().position(|waiting| waiting.cancel().is_cancelled()) {
                cancelled.extend(line.remove(i));
            }
        }
        self.0.retain(|_, line| !line.is_empty());
        cancelled
    }

    /// Takes out all requests.
    pub fn take_all(&mut self) -> Vec<Waiting> {
        std::mem::take(&mut self.0).into_values().flatten().collect()
    }
}
