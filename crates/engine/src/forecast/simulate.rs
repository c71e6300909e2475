//! Replays routing traces against expert caches: the hits of a policy, and the most hits that were possible.
//!
//! Only generated tokens count, because the experts of a prompt are read once per chunk whatever the cache does. A prompt
//! fills free slots and evicts nothing. All caches start empty, except the best fixed set.

use std::collections::BTreeSet;

use super::trace::{Phase, Trace};
use crate::experts::policy::Policy;
use crate::experts::slots::reads_at_once;
use crate::experts::tier::Tier;

/// The requests to an expert store, in order.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    experts: usize,
    requests: Vec<Request>,
    /// The distinct experts of each request, one request after another.
    asked: Vec<usize>,
}

/// The experts of one layer, needed together.
#[derive(Clone, Copy, Debug)]
struct Request {
    phase: Phase,
    /// Whether a token or a chunk of a prompt starts here.
    begins: bool,
    start: usize,
    end: usize,
}

/// The hits of one cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// Requested experts that were in the cache.
    pub hits: usize,
    /// All requested experts.
    pub asked: usize,
}

/// The hits of two tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierHits {
    /// Requested experts that were in device memory.
    pub device: usize,
    /// Requested experts that were in RAM and not in device memory.
    pub memory: usize,
    /// All requested experts.
    pub asked: usize,
}

impl Hits {
    /// The share of hits; 0 without requests.
    pub fn rate(&self) -> f64 {
        if self.asked > 0 { self.hits as f64 / self.asked as f64 } else { 0.0 }
    }
}

impl Workload {
    /// A workload without requests, for a model with this many experts in all layers together.
    pub fn new(experts: usize) -> Workload {
        Workload { experts, ..Workload::default() }
    }

    /// The requests of a trace.
    pub fn of(trace: &Trace) -> Workload {
        let mut workload = Workload::new(trace.layers().iter().map(|l| l.experts).sum());
        workload.append(trace);
        workload
    }

    /// Adds the requests of another trace of the same model, as the next conversation.
    pub fn append(&mut self, trace: &Trace) {
        let mut last = None;
        trace.visit(|choices| {
            let begins = last.replace(choices.batch) != Some(choices.batch);
            let experts = choices.experts.iter().map(|&expert| choices.first + usize::from(expert));
            self.push(choices.phase, begins, experts);
        });
    }

    /// Adds the experts of one layer. `begins` says whether the layer is the first one of a token or of a chunk.
    ///
    /// # Panics
    /// If the model has no such expert.
    pub fn push(&mut self, phase: Phase, begins: bool, experts: impl Iterator<Item = usize>) {
        let mut distinct: Vec<usize> = experts.collect();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.last().is_none_or(|&e| e < self.experts), "an expert is not the model's");
        let start = self.asked.len();
        self.asked.append(&mut distinct);
        self.requests.push(Request { phase, begins, start, end: self.asked.len() });
    }

    /// The number of experts in all layers together.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// The fewest slots that can work: those that one layer needs at once.
    pub fn least_slots(&self) -> usize {
        self.answers().map(<[usize]>::len).max().unwrap_or(1)
    }

    /// The hits of a policy with this many slots, but at least [`least_slots`](Self::least_slots).
    pub fn play(&self, slots: usize, policy: &mut dyn Policy) -> Hits {
        let mut cache = Cache::new(self.experts, slots.max(self.least_slots()));
        let mut hits = Hits::default();
        for request in &self.requests {
            let asked = &self.asked[request.start..request.end];
            if request.begins {
                policy.tick();
            }
            match request.phase {
                Phase::Prompt => asked.iter().for_each(|&expert| cache.offer(expert)),
                Phase::Answer => {
                    asked.iter().for_each(|&expert| policy.used(expert));
                    hits.asked += asked.len();
                    hits.hits += asked.iter().filter(|&&expert| cache.place[expert].is_some()).count();
                    cache.demand(asked, policy);
                }
            }
        }
        hits
    }

    /// The hits of a policy with these numbers of slots in device memory and in RAM, but at least
    /// [`least_slots`](Self::least_slots) of each.
    pub fn play_tiers(&self, above: usize, below: usize, policy: &mut dyn Policy) -> TierHits {
        let mut tier = Tier::new(self.experts, &[above.max(self.least_slots())], vec![(1, 0)], 1);
        let mut cache = Cache::new(self.experts, below.max(self.least_slots()));
        let mut hits = TierHits::default();
        for request in &self.requests {
            let asked = &self.asked[request.start..request.end];
            if request.begins {
                policy.tick();
            }
            let (there, missing): (Vec<usize>, Vec<usize>) =
                asked.iter().filter(|&&e| tier.find(e).is_none()).partition(|&&e| cache.place[e].is_some());
            if request.phase == Phase::Answer {
                asked.iter().for_each(|&expert| policy.used(expert));
                hits.asked += asked.len();
                hits.device += asked.len() - there.len() - missing.len();
                hits.memory += there.len();
            }
            for some in there.chunks(tier.at_once(0)) {
                tier.place(0, some, policy);
            }
            for expert in missing {
                cache.offer(expert);
                if cache.place[expert].is_none() {
                    let leaves = tier.victim(0, &mut cache.resident.iter().copied(), policy);
                    cache.replace(leaves, expert);
                }
                tier.place(0, &[expert], policy);
            }
        }
        hits
    }

    /// The hits of the best fixed set: the most used experts, which are known in advance and in the cache from the start.
    /// No slot is needed for experts outside the set.
    pub fn best_fixed_set(&self, slots: usize) -> Hits {
        let mut uses = vec![0; self.experts];
        self.answers().flatten().for_each(|&expert| uses[expert] += 1);
        uses.sort_unstable_by(|a, b| b.cmp(a));
        Hits { hits: uses.iter().take(slots).sum(), asked: uses.iter().sum() }
    }

    /// The most hits that are possible from an empty cache: Belady's rule evicts the expert that is needed again last,
    /// perhaps one that was just used. It requires knowledge of the future.
    pub fn belady(&self, slots: usize) -> Hits {
        let slots = slots.max(self.least_slots());
        let next = self.next_uses();
        // When each expert in the cache that is not in use is needed next.
        let mut due: Vec<Option<usize>> = vec![None; self.experts];
        let mut queue: BTreeSet<(usize, usize)> = BTreeSet::new();
        let mut hits = Hits::default();
        for request in &self.requests {
            let asked = &self.asked[request.start..request.end];
            let places = request.start..request.end;
            if request.phase == Phase::Prompt {
                for (&expert, place) in asked.iter().zip(places) {
                    if due[expert].is_none() && queue.len() < slots {
                        due[expert] = Some(next[place]);
                        queue.insert((next[place], expert));
                    }
                }
                continue;
            }
            hits.asked += asked.len();
            for &expert in asked {
                if let Some(time) = due[expert].take() {
                    queue.remove(&(time, expert));
                    hits.hits += 1;
                }
            }
            for (&expert, place) in asked.iter().zip(places) {
                due[expert] = Some(next[place]);
                queue.insert((next[place], expert));
            }
            while queue.len() > slots {
                let (_, expert) = queue.pop_last().expect("there are more than the slots");
                due[expert] = None;
            }
        }
        hits
    }

    /// For each place in `asked`, the next place where a generated token requests the same expert.
    fn next_uses(&self) -> Vec<usize> {
        let mut next = vec![usize::MAX; self.asked.len()];
        let mut seen = vec![usize::MAX; self.experts];
        for request in self.requests.iter().rev() {
            for place in (request.start..request.end).rev() {
                let expert = self.asked[place];
                next[place] = seen[expert];
                if request.phase == Phase::Answer {
                    seen[expert] = place;
                }
            }
        }
        next
    }

    /// The experts of each request that counts.
    fn answers(&self) -> impl Iterator<Item = &[usize]> {
        let answers = self.requests.iter().filter(|r| r.phase == Phase::Answer);
        answers.map(|request| &self.asked[request.start..request.end])
    }
}

/// The experts in the cache.
struct Cache {
    slots: usize,
    resident: Vec<usize>,
    /// `[experts]` The index of each in `resident`.
    place: Vec<Option<usize>>,
}

impl Cache {
    fn new(experts: usize, slots: usize) -> Cache {
        Cache { slots, resident: Vec::new(), place: vec![None; experts] }
    }

    /// Adds an expert if a slot is free.
    fn offer(&mut self, expert: usize) {
        if self.place[expert].is_none() && self.resident.len() < self.slots {
            self.place[expert] = Some(self.resident.len());
            self.resident.push(expert);
        }
    }

    /// Adds missing experts, as many at a time as the store does. Experts that were in the cache stay until all are computed.
    fn demand(&mut self, asked: &[usize], policy: &mut dyn Policy) {
        let (mut in_use, missing): (Vec<usize>, Vec<usize>) =
            asked.iter().partition(|&&expert| self.place[expert].is_some());
        let there = in_use.len();
        for expert in missing {
            if in_use.len() - there == reads_at_once(self.slots) {
                in_use.remove(there);
            }
            in_use.push(expert);
            self.offer(expert);
            if self.place[expert].is_none() {
                let mut candidates = self.resident.iter().copied().filter(|e| !in_use.contains(e));
                let victim = policy.victim(&mut candidates);
                self.replace(victim, expert);
            }
        }
    }

    fn replace(&mut self, victim: usize, expert: usize) {
        let place = self.place[victim].take().expect("the victim is a resident");
        self.resident[place] = expert;
        self.place[expert] = Some(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::policy::{self, PolicyKind};
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{RngCore, SeedableRng};

    const EXPERTS: usize = 6;

    /// Requests for one to three of six experts; the first is a prompt.
    fn random(seed: u64) -> Workload {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut workload = Workload::new(EXPERTS);
        for i in 0..8 {
            let phase = if i == 0 { Phase::Prompt } else { Phase::Answer };
            let experts: Vec<_> = (0..1 + i % 3).map(|_| rng.next_u32() as usize % EXPERTS).collect();
            workload.push(phase, i % 4 == 0, experts.into_iter());
        }
        workload
    }

    /// The most hits from a request on, with these residents (a bit each), of all ways to evict.
    fn most_hits(workload: &Workload, request: usize, resident: u32, slots: u32) -> usize {
        let Some(&Request { phase, start, end, .. }) = workload.requests.get(request) else { return 0 };
        let asked = &workload.asked[start..end];
        if phase == Phase::Prompt {
            let fill = |r: u32, &e: &usize| if r.count_ones() < slots { r | 1 << e } else { r };
            return most_hits(workload, request + 1, asked.iter().fold(resident, fill), slots);
        }
        let needed: u32 = asked.iter().map(|e| 1 << e).sum();
        let best = (0..1_u32 << EXPERTS)
            .filter(|kept| kept & !(resident | needed) == 0)
            .filter(|kept| kept.count_ones() == slots.min((resident | needed).count_ones()))
            .map(|kept| most_hits(workload, request + 1, kept, slots))
            .max();
        (resident & needed).count_ones() as usize + best.unwrap_or(0)
    }

    #[test]
    fn beladys_rule_is_the_optimum() {
        for seed in 0..30 {
            let workload = random(seed);
            for slots in workload.least_slots()..EXPERTS {
                let hits = workload.belady(slots).hits;
                assert_eq!(hits, most_hits(&workload, 0, 0, slots as u32), "seed {seed}, {slots} slots");
                for kind in PolicyKind::ALL {
                    assert!(workload.play(slots, &mut *policy::make(kind, EXPERTS)).hits <= hits);
                }
            }
        }
    }

    #[test]
    fn prompts_fill_free_slots_and_do_not_count() {
        let mut workload = Workload::new(4);
        workload.push(Phase::Prompt, true, [0, 1, 2].into_iter());
        for expert in [1, 3, 1, 2] {
            workload.push(Phase::Answer, true, [expert].into_iter());
        }
        // The prompt leaves 0 and 1; 0 makes room for 3, and that, least recently used, for 2.
        let mut lru = policy::make(PolicyKind::Lru, 4);
        assert_eq!(workload.play(2, &mut *lru), Hits { hits: 2, asked: 4 });
        assert_eq!(workload.belady(2), Hits { hits: 2, asked: 4 });
        assert_eq!(workload.best_fixed_set(2), Hits { hits: 3, asked: 4 });
        assert_eq!(workload.best_fixed_set(4).rate(), 1.0);
        assert_eq!(Hits::default().rate(), 0.0);
    }

    /// Tokens that mostly use the same few of sixty experts.
    fn skewed() -> Workload {
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let mut workload = Workload::new(60);
        for token in 0..2000 {
            let layer = token % 3;
            let experts = (0..4).map(|_| {
                let (a, b) = (rng.next_u32() % 20, rng.next_u32() % 20);
                20 * layer + (a * b / 20) as usize
            });
            workload.push(Phase::Answer, layer == 0, experts.collect::<Vec<_>>().into_iter());
        }
        workload
    }

    #[test]
    fn the_upper_tier_hits_like_a_cache_and_both_like_a_larger_one() {
        let workload = skewed();
        for (above, below) in [(12, 12), (20, 10), (30, 20)] {
            let make = || policy::make(PolicyKind::default(), 60);
            let hits = workload.play_tiers(above, below, &mut *make());
            let alone = workload.play(above, &mut *make());
            let both = workload.play(above + below, &mut *make());
            assert_eq!(hits.asked, both.asked);
            assert!(hits.device * 100 >= alone.hits * 98, "{hits:?}, a cache alone {alone:?}");
            // Were all of them doubled, the lower tier would add nothing.
            assert!((hits.device + hits.memory) * 100 >= both.hits * 85, "{hits:?}, one cache {both:?}");
        }
        let all = workload.play_tiers(12, 60, &mut *policy::make(PolicyKind::default(), 60));
        // Everything is read once.
        assert!(all.asked - all.device - all.memory <= 60);
    }

    #[test]
    fn a_cache_has_room_for_what_one_layer_needs() {
        let mut workload = Workload::new(4);
        workload.push(Phase::Answer, true, [0, 1, 0, 3].into_iter());
        workload.push(Phase::Answer, true, [0, 1, 3].into_iter());
        assert_eq!(workload.least_slots(), 3);
        let mut lru = policy::make(PolicyKind::Lru, 4);
        assert_eq!(workload.play(1, &mut *lru), Hits { hits: 3, asked: 6 });
        assert_eq!(workload.belady(1), Hits { hits: 3, asked: 6 });
    }
}
