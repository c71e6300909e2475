//! Eviction policies: which resident expert is evicted when an expert needs a slot.

/// Decides which expert is evicted. Experts are numbered across all layers: layer · experts + expert.
pub trait Policy: Send {
    /// A new token (or a chunk of a prompt) begins.
    fn tick(&mut self);

    /// A token that is being generated uses an expert.
    fn used(&mut self, expert: usize);

    /// The value of keeping an expert: the one with the lowest score is evicted.
    fn score(&self, expert: usize) -> f64;

    /// The expert to evict among these resident, unpinned ones; there is at least one.
    fn victim(&self, candidates: &mut dyn Iterator<Item = usize>) -> usize {
        let scored = candidates.map(|expert| (self.score(expert), expert));
        scored.min_by(|a, b| a.0.total_cmp(&b.0)).expect("there is a candidate").1
    }

    /// How often each expert is used, for the heat file: `[experts]`, larger is hotter.
    fn heat(&self) -> Vec<f32>;

    /// Starts from the heat of an earlier run.
    fn warm(&mut self, heat: &[f32]);
}

/// The eviction policies.
///
/// # Examples
/// ```
/// use forebay_engine::{Options, PolicyKind};
///
/// let policy = PolicyKind::parse("lru").unwrap_or_default();
/// let options = Options::new().policy(policy);
/// # assert_eq!(options.policy, PolicyKind::Lru);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyKind {
    /// Evicts the least recently used expert. The reference to compare with.
    Lru,
    /// Evicts the least frequently used expert, where old uses count less.
    Lfu,
    /// Evicts the expert that is least likely to be used, relative to the time until its layer computes again.
    #[default]
    Forecast,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [PolicyKind; 3] = [PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::Forecast];

    /// The name for people, flags and JSON.
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Lru => "lru",
            PolicyKind::Lfu => "lfu",
            PolicyKind::Forecast => "forecast",
        }
    }

    /// The policy with this name.
    pub fn parse(name: &str) -> Option<PolicyKind> {
        PolicyKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// A policy for a model with `experts` experts in all layers together.
pub fn make(kind: PolicyKind, experts: usize) -> Box<dyn Policy> {
    match kind {
        PolicyKind::Lru => Box::new(Lru::new(experts)),
        PolicyKind::Lfu => Box::new(Lfu { uses: Uses::new(experts, LASTING) }),
        PolicyKind::Forecast => Box::new(Forecast::new(experts)),
    }
}

struct Lru {
    /// `[experts]` When each expert was last used.
    last: Vec<u64>,
    now: u64,
}

impl Lru {
    fn new(experts: usize) -> Lru {
        Lru { last: vec![0; experts], now: 0 }
    }
}

impl Policy for Lru {
    fn tick(&mut self) {}

    fn used(&mut self, expert: usize) {
        self.now += 1;
        self.last[expert] = self.now;
    }

    fn score(&self, expert: usize) -> f64 {
        self.last[expert] as f64
    }

    fn heat(&self) -> Vec<f32> {
        self.last.iter().map(|&last| (last as f64 / self.now.max(1) as f64) as f32).collect()
    }

    fn warm(&mut self, heat: &[f32]) {
        let mut order: Vec<usize> = (0..self.last.len()).filter(|&expert| heat[expert] > 0.0).collect();
        order.sort_by(|&a, &b| heat[a].total_cmp(&heat[b]));
        order.into_iter().for_each(|expert| self.used(expert));
    }
}

struct Lfu {
    uses: Uses,
}

impl Policy for Lfu {
    fn tick(&mut self) {
        self.uses.age();
    }

    fn used(&mut self, expert: usize) {
        self.uses.add(expert);
    }

    fn score(&self, expert: usize) -> f64 {
        self.uses.rate(expert)
    }

    fn heat(&self) -> Vec<f32> {
        self.uses.heat()
    }

    fn warm(&mut self, heat: &[f32]) {
        self.uses.warm(heat);
    }
}

/// Scores an expert by the probability that the next token uses it, divided by the time until that token reaches its
/// layer. A slot with an expert of the layer just computed cannot produce a hit for a whole token; one with an expert
/// of the next layer can at once. Two averages estimate the probability, because routers repeat themselves from one
/// token to the next as well as over a whole conversation.
struct Forecast {
    recent: Uses,
    lasting: Uses,
    /// `[experts]` The position of each expert's layer within a token: how many uses came before its last one.
    position: Vec<u32>,
    /// Uses since the current token began.
    now: u32,
    /// Uses of a whole token.
    round: u32,
}

/// Half-lives of the two averages in tokens, and the weight of the recent one. None is critical: half or twice of
/// each changes the hit rates of recorded traces by little more than 0.01 (docs/performance-cache.md).
const RECENT: f64 = 3.0;
const LASTING: f64 = 64.0;
const RECENT_SHARE: f64 = 0.3;

/// Added to every waiting time, as a fraction of a token: otherwise the experts of the next layer would have an
/// infinite score.
const LEAST_WAIT: f64 = 0.1;

impl Forecast {
    fn new(experts: usize) -> Forecast {
        Forecast {
            recent: Uses::new(experts, RECENT),
            lasting: Uses::new(experts, LASTING),
            position: vec![0; experts],
            now: 0,
            round: 1,
        }
    }

    /// Uses until the layer of an expert computes again.
    fn wait(&self, expert: usize) -> u32 {
        let position = self.position[expert];
        if position >= self.now {
            position - self.now
        } else {
            (position + self.round).saturating_sub(self.now)
        }
    }
}

impl Policy for Forecast {
    fn tick(&mut self) {
        self.recent.age();
        self.lasting.age();
        // A chunk of a prompt reports no uses and tells nothing about the uses of a token.
        if self.now > 0 {
            self.round = self.now;
            self.now = 0;
        }
    }

    fn used(&mut self, expert: usize) {
        self.recent.add(expert);
        self.lasting.add(expert);
        self.position[expert] = self.now;
        self.now += 1;
    }

    fn score(&self, expert: usize) -> f64 {
        let (recent, lasting) = (self.recent.rate(expert), self.lasting.rate(expert));
        let likely = RECENT_SHARE * recent + (1.0 - RECENT_SHARE) * lasting;
        likely / (LEAST_WAIT * f64::from(self.round) + f64::from(self.wait(expert)))
    }

    fn heat(&self) -> Vec<f32> {
        self.lasting.heat()
    }

    fn warm(&mut self, heat: &[f32]) {
        self.lasting.warm(heat);
    }
}

/// How often experts were used, where old uses count less.
struct Uses {
    /// `[experts]` Uses, in a unit that grows with time.
    count: Vec<f64>,
    /// What one use adds now. Growing it is cheaper than shrinking all counts.
    unit: f64,
    /// The count of an expert that every token used.
    full: f64,
    growth: f64,
}

impl Uses {
    /// Halves the weight of a use every `half_life` tokens.
    fn new(experts: usize, half_life: f64) -> Uses {
        Uses { count: vec![0.0; experts], unit: 1.0, full: 1.0, growth: (1.0 / half_life).exp2() }
    }

    fn age(&mut self) {
        self.unit *= self.growth;
        self.full += self.unit;
        if self.unit > 1e100 {
            self.count.iter_mut().for_each(|count| *count /= self.unit);
            self.full /= self.unit;
            self.unit = 1.0;
        }
    }

    fn add(&mut self, expert: usize) {
        self.count[expert] += self.unit;
    }

    /// The share of tokens that used an expert.
    fn rate(&self, expert: usize) -> f64 {
        self.count[expert] / self.full
    }

    fn heat(&self) -> Vec<f32> {
        (0..self.count.len()).map(|expert| self.rate(expert) as f32).collect()
    }

    /// Treats the heat as if an endless conversation with these rates came before the first token.
    fn warm(&mut self, heat: &[f32]) {
        self.full = self.unit / (1.0 - 1.0 / self.growth);
        for (count, &heat) in self.count.iter_mut().zip(heat) {
            *count = f64::from(heat) * self.full;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forecast::simulate::{Hits, Workload};
    use crate::forecast::trace::Phase;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{RngCore, SeedableRng};

    const LAYERS: usize = 24;
    const EXPERTS: usize = 32;
    const USED: usize = 4;
    const ALL: usize = LAYERS * EXPERTS;
    /// Experts that one token uses.
    const WORKING_SET: usize = LAYERS * USED;

    /// Adds tokens whose experts `choose` picks: it returns any number for a token and a layer.
    fn write(workload: &mut Workload, tokens: usize, mut choose: impl FnMut(usize, usize) -> usize) {
        for token in 0..tokens {
            for layer in 0..LAYERS {
                let mut chosen = Vec::new();
                while chosen.len() < USED {
                    let expert = choose(token, layer) % EXPERTS;
                    if !chosen.contains(&expert) {
                        chosen.push(expert);
                    }
                }
                let experts = chosen.into_iter().map(|expert| layer * EXPERTS + expert);
                workload.push(Phase::Answer, layer == 0, experts);
            }
        }
    }

    /// Adds tokens that choose among `from`, `from + 1`, … `from + among - 1` of each layer.
    fn topic(workload: &mut Workload, tokens: usize, from: usize, among: usize) {
        let mut rng = ChaCha8Rng::seed_from_u64(from as u64);
        write(workload, tokens, |_, _| from + rng.next_u32() as usize % among);
    }

    fn play(kind: PolicyKind, workload: &Workload, slots: usize) -> Hits {
        workload.play(slots, &mut *make(kind, workload.experts()))
    }

    /// The worst case for a cache: random choices, and a token that uses more experts than there are slots.
    #[test]
    fn below_one_tokens_working_set_lru_hits_nothing_and_the_default_hits_the_share_that_fits() {
        let mut workload = Workload::new(ALL);
        topic(&mut workload, 300, 0, EXPERTS);
        for slots in [ALL / 20, ALL / 10, WORKING_SET - USED] {
            assert_eq!(play(PolicyKind::Lru, &workload, slots).hits, 0);
            let (rate, share) =
                (play(PolicyKind::default(), &workload, slots).rate(), slots as f64 / ALL as f64);
            assert!(rate >= 0.8 * share, "{slots} slots: {rate:.3} of {share:.3}");
        }
    }

    #[test]
    fn a_cycle_larger_than_the_cache_is_kept_in_part() {
        let mut workload = Workload::new(ALL);
        let mut next = 0;
        write(&mut workload, 100, |_, _| {
            next += 1;
            next % USED
        });
        let slots = WORKING_SET / 2;
        assert_eq!(play(PolicyKind::Lru, &workload, slots).hits, 0);
        let (hits, most) = (play(PolicyKind::default(), &workload, slots), workload.belady(slots));
        assert!(hits.hits * 100 >= most.hits * 95, "{hits:?} of {most:?}");
    }

    #[test]
    fn the_default_adapts_when_the_topic_changes() {
        let slots = LAYERS * 8;
        let (mut before, mut both, mut after) = (Workload::new(ALL), Workload::new(ALL), Workload::new(ALL));
        topic(&mut before, 300, 0, 10);
        topic(&mut both, 300, 0, 10);
        topic(&mut both, 300, 16, 10);
        topic(&mut after, 300, 16, 10);
        let kind = PolicyKind::default();
        let hits = play(kind, &both, slots).hits - play(kind, &before, slots).hits;
        let fresh = play(kind, &after, slots).hits;
        assert!(hits * 100 >= fresh * 90, "{hits} of {fresh}");
    }

    #[test]
    fn the_heat_of_an_earlier_run_gives_hits_at_once() {
        let mut workload = Workload::new(ALL);
        topic(&mut workload, 200, 3, 6);
        let mut again = Workload::new(ALL);
        topic(&mut again, 4, 3, 6);
        for kind in PolicyKind::ALL {
            let mut learned = make(kind, ALL);
            workload.play(ALL, &mut *learned);
            let heat = learned.heat();
            assert!(heat[3] > heat[20] && heat.iter().all(|h| (0.0..=1.0).contains(h)), "{}", kind.name());
            let mut warmed = make(kind, ALL);
            warmed.warm(&heat);
            // Of a hot and a cold expert, the cold one is evicted.
            assert_eq!(warmed.victim(&mut [3, 20].into_iter()), 20, "{}", kind.name());
            assert!(again.play(ALL / 4, &mut *warmed).hits > 0);
        }
    }

    /// The unit of counts doubles every two tokens. Without rescaling it would be infinite after two thousand.
    #[test]
    fn counts_stay_finite_however_long_a_conversation_is() {
        for kind in PolicyKind::ALL {
            let mut policy = make(kind, 2);
            for _ in 0..20_000 {
                policy.tick();
                policy.used(1);
            }
            assert!(policy.heat().iter().all(|h| h.is_finite()));
            assert_eq!(policy.victim(&mut [0, 1].into_iter()), 0);
        }
    }

    #[test]
    fn names_are_read_back() {
        for kind in PolicyKind::ALL {
            assert_eq!(PolicyKind::parse(kind.name()), Some(kind));
        }
        assert_eq!(PolicyKind::parse("best"), None);
    }
}
