//! The whole measurement of one backend: alternating runs, each in a process of its own, then the table and the bars.

use std::fmt::Write;
use std::process::Command;

use crate::contest::{BACKENDS, Backend, CONTESTANTS, PEERS};
use crate::job::{Failed, Ran};
use crate::meter::Cost;
use crate::stats::{Judged, Median};

const SIZES: [usize; 2] = [256, 1024];

/// Throughput beside the raw program with the same promise, at least.
const RATE_BAR: f64 = 0.95;
/// Processor time beside it, at most.
const CPU_BAR: f64 = 1.10;
/// A larger backlog or more topics may slow it down to this.
const FLAT_BAR: f64 = 0.95;
/// Runs of each backlog and number of topics.
const FLAT_RUNS: usize = 5;
/// Parts of the capacity at which messages are timed.
const LOADS: [f64; 3] = [0.1, 0.5, 0.8];
/// Seconds of each of those.
const TIMED: f64 = 10.0;

/// A stretch of a run, by name.
type Stretch = (&'static str, fn(&Ran) -> Cost);

struct Whole<'a> {
    backend: &'a Backend,
    url: &'a str,
    topics: usize,
    text: String,
    verdicts: Vec<Judged>,
    void: bool,
}

/// Runs everything and prints it.
pub(crate) fn run(backend: &str, url: &str, pairs: usize, peers: Option<&str>) -> Result<(), Failed> {
    let known = BACKENDS.iter().find(|known| known.name == backend);
    let backend = known.ok_or_else(|| format!("{backend} is none of redis, amqp, kafka"))?;
    let mut whole = Whole { backend, url, topics: 0, text: String::new(), verdicts: Vec::new(), void: false };
    let load = load();
    if let Err(error) = whole.everything(pairs, peers) {
        println!("{}", whole.text);
        return Err(error);
    }
    let count = |judged: Judged| whole.verdicts.iter().filter(|verdict| **verdict == judged).count();
    let (met, missed, undecided) = (count(Judged::Met), count(Judged::Missed), count(Judged::Undecided));
    let void = if whole.void { " (void: batches were too little faster than messages one by one)" } else { "" };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    println!("{}, on {cores} cores; load of the machine {load} before, {} after.\n", backend.title, self::load());
    println!("{}", whole.text);
    println!("bars: {met} met, {missed} missed, {undecided} undecided{void}");
    Ok(())
}

/// How many programs wanted a processor in the last minute: what else ran beside this.
fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or("unknown").to_owned()
}

/// What a program prints.
fn told(program: &mut Command) -> Result<String, Failed> {
    let output = program.output()?;
    if !output.status.success() {
        return Err(format!("{program:?} failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

impl Whole<'_> {
    fn everything(&mut self, pairs: usize, peers: Option<&str>) -> Result<(), Failed> {
        for size in SIZES {
            self.compare(size, pairs)?;
        }
        if let Some(program) = peers {
            self.peers(program, pairs)?;
        }
        if let Some(most) = self.backend.one_send {
            self.one_send(most, pairs)?;
        }
        let capacity = self.capacity()?;
        self.latency(capacity)?;
        self.flat()
    }

    fn topic(&mut self) -> String {
        self.topics += 1;
        self.last_topic()
    }

    fn last_topic(&self) -> String {
        format!("bench{}-{}", std::process::id(), self.topics)
    }

    /// Runs this program once more, and returns what stands behind the word it prints.
    fn child(&self, word: &str, args: &[&str]) -> Result<String, Failed> {
        let output = Command::new(std::env::current_exe()?).args(args).output()?;
        self.tidy(&self.last_topic());
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = told.lines().find(|line| line.starts_with(word)).map(str::to_owned);
        match line {
            Some(line) if output.status.success() => Ok(line),
            _ => Err(format!("{} failed: {}", args.join(" "), String::from_utf8_lossy(&output.stderr)).into()),
        }
    }

    /// Deletes what a run left, where that is worth it.
    fn tidy(&self, topic: &str) {
        if self.backend.tidy
            && let Ok(program) = std::env::current_exe()
            && let Err(error) = told(Command::new(program).args(["tidy", self.url, topic]))
        {
            eprintln!("{error}");
        }
    }

    fn once(&mut self, contestant: &str, n: usize, size: usize) -> Result<Ran, Failed> {
        let topic = self.topic();
        let (n, size) = (n.to_string(), size.to_string());
        let line = self.child("ran", &["run", self.backend.name, contestant, self.url, &topic, &n, &size])?;
        Ran::read(&line).ok_or_else(|| format!("not understood: {line}").into())
    }

    fn judge(&mut self, judged: Judged) -> &'static str {
        self.verdicts.push(judged);
        judged.word()
    }

    /// Alternating runs of all contestants with messages of one size.
    fn compare(&mut self, size: usize, pairs: usize) -> Result<(), Failed> {
        let n = self.backend.n;
        let mut ran: [Vec<Ran>; 3] = Default::default();
        // Unmeasured: the server's first work is slower than its second.
        for contestant in CONTESTANTS {
            self.once(contestant, n / 10, size)?;
        }
        for pair in 0..pairs {
            // Each time in the other order, so that what a run leaves to the next hurts both alike.
            let mut turn = [0, 1, 2];
            if pair % 2 == 1 {
                turn.reverse();
            }
            for contestant in turn {
                ran[contestant].push(self.once(CONTESTANTS[contestant], n, size)?);
            }
            eprintln!("{size} bytes: pair {} of {pairs}", pair + 1);
        }
        let [ours, same, bare] = ran;
        let one = self.once("one", self.backend.one_by_one, size)?;
        let stretches: [Stretch; 2] = [("send", |ran| ran.send), ("receive", |ran| ran.receive)];
        let _ = writeln!(
            self.text,
            "**{size} bytes**, {pairs} pairs of {n} messages\n\n| | ours | same promise | bare | one by one |\n|---|---|---|---|---|"
        );
        for (what, of) in stretches {
            let rate =
                |runs: &[Ran]| Median::of(&runs.iter().map(|ran| n as f64 / of(ran).seconds).collect::<Vec<_>>()).value;
            let cpu = |runs: &[Ran]| {
                Median::of(&runs.iter().map(|ran| of(ran).cpu * 1e6 / n as f64).collect::<Vec<_>>()).value
            };
            let alone = self.backend.one_by_one as f64 / of(&one).seconds;
            let faster = rate(&bare) / alone;
            self.void |= faster < self.backend.void;
            let _ = writeln!(
                self.text,
                "| {what}, messages a second | {:.0} | {:.0} | {:.0} | {alone:.0} (bare is {faster:.0} times that) |\n\
                 | {what}, µs of processor a message | {:.2} | {:.2} | {:.2} | |",
                rate(&ours),
                rate(&same),
                rate(&bare),
                cpu(&ours),
                cpu(&same),
                cpu(&bare),
            );
        }
        let _ = writeln!(self.text, "\n| bar | median | 95 % interval | bound | |\n|---|---|---|---|---|");
        for (what, of) in stretches {
            for (beside, raw) in [("same promise", &same), ("bare", &bare)] {
                let ratio = |part: fn(Cost) -> f64| -> Vec<f64> {
                    ours.iter().zip(raw.iter()).map(|(ours, raw)| part(of(ours)) / part(of(raw))).collect()
                };
                let rate = Median::of(&ratio(|cost| cost.seconds.recip()));
                let cpu = Median::of(&ratio(|cost| cost.cpu));
                // Only the raw program that promises the same is a bar; the other one shows what the promise costs.
                let judged = beside == "same promise";
                let word = if judged { self.judge(Judged::at_least(RATE_BAR, rate)) } else { "shown" };
                self.row(&format!("{what}, rate beside {beside}"), rate, &format!("at least {RATE_BAR}"), word);
                let word = if judged { self.judge(Judged::at_most(CPU_BAR, cpu)) } else { "shown" };
                self.row(&format!("{what}, processor beside {beside}"), cpu, &format!("at most {CPU_BAR}"), word);
            }
        }
        if let Some(most) = self.backend.beside_single_acks {
            let single = one.receive.cpu / self.backend.one_by_one as f64;
            let shares: Vec<f64> = ours.iter().map(|ran| ran.receive.cpu / n as f64 / single).collect();
            let share = Median::of(&shares);
            let word = self.judge(Judged::at_most(most, share));
            self.row("receive, processor beside an ack for each", share, &format!("at most {most}"), word);
        }
        self.text.push('\n');
        Ok(())
    }

    /// Ours beside other libraries, by turns: a third of the pairs, since they are far apart or the bar is not met.
    fn peers(&mut self, program: &str, pairs: usize) -> Result<(), Failed> {
        let listed = told(Command::new(program).args(["list", self.backend.name]))?;
        let names: Vec<&str> = listed.lines().collect();
        if names.is_empty() {
            return Ok(());
        }
        let (n, size) = (self.backend.n, SIZES[0]);
        let rounds = pairs.div_ceil(3).max(2);
        let mut ran: Vec<(Vec<Ran>, Vec<Ran>)> = names.iter().map(|_| Default::default()).collect();
        for round in 0..rounds {
            for (name, (ours, theirs)) in names.iter().zip(&mut ran) {
                let other = |whole: &mut Self| -> Result<Ran, Failed> {
                    let (topic, n, size) = (whole.topic(), n.to_string(), size.to_string());
                    let args = ["run", whole.backend.name, name, whole.url, &topic, &n, &size];
                    let said = told(Command::new(program).args(args))?;
                    whole.tidy(&topic);
                    Ok(said.lines().find_map(Ran::read).ok_or_else(|| format!("{name}: not understood: {said}"))?)
                };
                if round % 2 == 0 {
                    ours.push(self.once("ours", n, size)?);
                    theirs.push(other(self)?);
                } else {
                    theirs.push(other(self)?);
                    ours.push(self.once("ours", n, size)?);
                }
            }
            eprintln!("other libraries: round {} of {rounds}", round + 1);
        }
        let _ = writeln!(
            self.text,
            "**Other libraries**, {size} bytes, {rounds} rounds of {n} messages: our rate beside theirs\n\n\
             | | theirs, messages a second | µs of processor | our rate | 95 % interval | bound | |\n|---|---|---|---|---|---|---|"
        );
        let stretches: [Stretch; 2] = [("send", |ran| ran.send), ("receive", |ran| ran.receive)];
        for (name, (ours, theirs)) in names.iter().zip(&ran) {
            let bar = PEERS.iter().find(|peer| peer.backend == self.backend.name && peer.name == *name);
            for (what, of) in stretches {
                let ratios: Vec<f64> =
                    ours.iter().zip(theirs).map(|(ours, theirs)| of(theirs).seconds / of(ours).seconds).collect();
                let middle = |part: fn(Cost) -> f64| {
                    Median::of(&theirs.iter().map(|ran| part(of(ran)) / n as f64).collect::<Vec<_>>()).value
                };
                let (rate, cpu) = (middle(|cost| cost.seconds).recip(), middle(|cost| cost.cpu) * 1e6);
                let Median { value, low, high } = Median::of(&ratios);
                let least = bar.and_then(|bar| if what == "send" { Some(bar.send) } else { bar.receive });
                let (bound, word) = match least {
                    Some(least) => {
                        (format!("at least {least}"), self.judge(Judged::at_least(least, Median::of(&ratios))))
                    }
                    None => (String::new(), "shown"),
                };
                let _ = writeln!(
                    self.text,
                    "| {what}, {name} | {rate:.0} | {cpu:.2} | {value:.1} | {low:.1} to {high:.1} | {bound} | {word} |"
                );
            }
        }
        self.text.push('\n');
        Ok(())
    }

    fn row(&mut self, what: &str, Median { value, low, high }: Median, bound: &str, word: &str) {
        let bound = if word == "shown" { "" } else { bound };
        let _ = writeln!(self.text, "| {what} | {value:.2} | {low:.2} to {high:.2} | {bound} | {word} |");
    }

    /// Messages a second, as such a run says.
    fn rate(&self, args: &[&str]) -> Result<f64, Failed> {
        Ok(self.child("rate", args)?.trim_start_matches("rate ").parse()?)
    }

    fn through(&mut self, n: usize, topics: usize, backlog: usize) -> Result<f64, Failed> {
        self.through_of(self.url, n, topics, backlog)
    }

    fn through_of(&mut self, url: &str, n: usize, topics: usize, backlog: usize) -> Result<f64, Failed> {
        let topic = self.topic();
        let [n, topics, backlog] = [n, topics, backlog].map(|number| number.to_string());
        self.rate(&["through", url, &topic, &n, "256", &topics, &backlog])
    }

    fn in_hand(&mut self, n: usize, most: usize) -> Result<f64, Failed> {
        let topic = self.topic();
        let [n, most] = [n, most].map(|number| number.to_string());
        // Of a partition at most 16,384 are in hand. When others were read to their end first, half of the usual twelve hold less
        // than 100,000, and the program, which hands nothing back before it has that many, would wait for ever.
        let url = format!("{}?partitions=24", self.url);
        self.rate(&["in-hand", &url, &topic, &n, "256", &most])
    }

    /// How long an awaited send takes, beside one by hand.
    fn one_send(&mut self, most: f64, pairs: usize) -> Result<(), Failed> {
        let n = self.backend.one_by_one;
        let mut times: [Vec<f64>; 3] = Default::default();
        for pair in 0..pairs {
            let mut turn = [(0, "ours-single"), (1, "same-single"), (2, "bare-single")];
            if pair % 2 == 1 {
                turn.reverse();
            }
            for (at, contestant) in turn {
                times[at].push(self.once(contestant, n, SIZES[0])?.send.seconds * 1e3 / n as f64);
            }
        }
        let [ours, same, bare] = &times;
        let beside = |theirs: &[f64]| Median::of(&ours.iter().zip(theirs).map(|(o, t)| o / t).collect::<Vec<_>>());
        let [time, same_time, bare_time] = [ours, same, bare].map(|times| Median::of(times).value);
        let (same, bare) = (beside(same), beside(bare));
        let word = self.judge(Judged::at_most(most, same));
        let _ = writeln!(
            self.text,
            "**One awaited send**, {} bytes, {pairs} times {n}: {time:.2} ms, same promise {same_time:.2} ms, bare {bare_time:.2} \
             ms\n\n| bar | median | 95 % interval | bound | |\n|---|---|---|---|---|",
            SIZES[0]
        );
        self.row("an awaited send, time beside same promise", same, &format!("at most {most}"), word);
        self.row("an awaited send, time beside bare", bare, "", "shown");
        self.text.push('\n');
        Ok(())
    }

    /// Messages a second that one client sends and receives at the same time.
    fn capacity(&mut self) -> Result<f64, Failed> {
        let runs: Vec<f64> = (0..FLAT_RUNS).map(|_| self.through(self.backend.n, 1, 0)).collect::<Result<_, _>>()?;
        Ok(Median::of(&runs).value)
    }

    fn latency(&mut self, capacity: f64) -> Result<(), Failed> {
        let _ = writeln!(
            self.text,
            "**Milliseconds from the intended send to the receipt**, 256 bytes; sent and received at once, {capacity:.0} messages a \
             second go through\n\n| load | messages a second | 50 % | 90 % | 99 % | 99.9 % |\n|---|---|---|---|---|---|"
        );
        for load in LOADS {
            let rate = capacity * load;
            let topic = self.topic();
            let (n, each) = (format!("{:.0}", rate * TIMED), format!("{rate:.0}"));
            // One that does not keep up is told that the topic is full, in the end: a row too.
            let waits = match self.child("waits", &["latency", self.url, &topic, &n, "256", &each]) {
                Ok(line) => line.trim_start_matches("waits ").replace(' ', " | "),
                Err(error) if error.to_string().contains("are allowed") => "did not keep up | | |".to_owned(),
                Err(error) => return Err(error),
            };
            let _ = writeln!(self.text, "| {:.0} % | {rate:.0} | {waits} |", load * 100.0);
            eprintln!("latency at {:.0} %", load * 100.0);
        }
        self.text.push('\n');
        Ok(())
    }

    /// The same work with ever more before it, and over ever more topics.
    fn flat(&mut self) -> Result<(), Failed> {
        let _ = writeln!(
            self.text,
            "**Flatness**, {FLAT_RUNS} rounds, 256 bytes, beside the smallest\n\n| | messages a second | rate | 95 % interval | bound | |\n|---|---|---|---|---|---|"
        );
        let backlogs = self.backend.backlogs;
        // As many as the smallest backlog holds, several times: long enough to be measured. Not more: beside the largest backlog
        // Redis has room for few, and these are sent while others are received.
        let n = (self.backend.n / 2).min(15_000);
        self.series("messages queued", backlogs, |whole, queued| whole.through(n, 1, queued))?;
        // Some hundred a topic, else it is measured how 500 topics begin and end.
        let topics = self.backend.topics;
        self.series("topics on one client", topics, |whole, topics| whole.through(10 * n, topics, 0))?;
        let (partitions, url) = (self.backend.partitions, self.url.to_owned());
        self.series("partitions", partitions, |whole, partitions| {
            whole.through_of(&format!("{url}?partitions={partitions}"), 10 * n, 1, 0)
        })?;
        let in_hand = self.backend.in_hand;
        self.series("deliveries in hand", in_hand, |whole, most| whole.in_hand(20 * n, most))?;
        self.text.push('\n');
        Ok(())
    }

    fn series(
        &mut self,
        what: &str,
        steps: &[usize],
        mut measure: impl FnMut(&mut Self, usize) -> Result<f64, Failed>,
    ) -> Result<(), Failed> {
        let mut rates: Vec<Vec<f64>> = vec![Vec::new(); steps.len()];
        for round in 0..FLAT_RUNS {
            for (rates, step) in rates.iter_mut().zip(steps) {
                // What fails has no rate: a row all the same, and far below every bound.
                rates.push(measure(self, *step).unwrap_or_else(|error| {
                    eprintln!("{step} {what}: {error}");
                    0.0
                }));
            }
            eprintln!("{what}: round {} of {FLAT_RUNS}", round + 1);
        }
        for (step, of_step) in steps.iter().zip(&rates) {
            let ratios: Vec<f64> = of_step.iter().zip(&rates[0]).map(|(rate, first)| rate / first).collect();
            let (Median { value: rate, .. }, Median { value, low, high }) = (Median::of(of_step), Median::of(&ratios));
            let judged =
                if step == &steps[0] { "" } else { self.judge(Judged::at_least(FLAT_BAR, Median::of(&ratios))) };
            let _ = writeln!(
                self.text,
                "| {step} {what} | {rate:.0} | {value:.2} | {low:.2} to {high:.2} | at least {FLAT_BAR} | {judged} |"
            );
        }
        Ok(())
    }
}
