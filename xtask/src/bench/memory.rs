//! `cargo xtask bench memory`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Command;

use super::callgrind::{Cost, Program};
use super::{Bar, page, summary};
use crate::Outcome;

/// Arguments of `cargo xtask bench memory`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Put the table into docs/performance.md.
    #[arg(long)]
    write: bool,
    /// Without the other libraries, which take a minute to build.
    #[arg(long)]
    no_peers: bool,
    /// Only these scenarios, and no bars.
    #[arg(long)]
    only: Vec<String>,
}

/// Messages of the shorter run. A thousand rounds of 64 would not change the last digit.
const N: u64 = 6400;

type Costs = BTreeMap<String, Cost>;

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    let ours = Program::build(&["bench", "--no-run", "--package", "anymq", "--bench", "memory"])?;
    if !args.only.is_empty() {
        for scenario in &args.only {
            print_cost(scenario, &ours.cost(scenario, messages(scenario))?);
        }
        return Ok(());
    }
    let mut costs = measure(&ours)?;
    if !args.no_peers {
        let manifest =
            ["build", "--release", "--manifest-path", "bench-peers/Cargo.toml", "--target-dir", "target/peers"];
        costs.append(&mut measure(&Program::build(&manifest)?)?);
    }
    let members = members(&ours)?;
    let bars = bars(&costs, &members, !args.no_peers)?;
    let table = table(&costs, &members, &bars);
    println!("\n{table}");
    if args.write {
        page::write("memory", &table)?;
    }
    println!("{}", summary(&bars));
    match bars.iter().filter(|bar| !bar.met).count() {
        0 => Ok(()),
        missed => Err(format!("{missed} bars are missed")),
    }
}

fn measure(program: &Program) -> Result<Costs, String> {
    let mut costs = Costs::new();
    for scenario in program.scenarios()? {
        let cost = program.cost(&scenario, messages(&scenario))?;
        print_cost(&scenario, &cost);
        costs.insert(scenario, cost);
    }
    Ok(costs)
}

fn messages(scenario: &str) -> u64 {
    // Every topic must have its turn.
    if scenario == "topics-1000" { 64 * 1000 } else { N }
}

fn print_cost(scenario: &str, cost: &Cost) {
    let allocations = cost.allocations.map(|n| format!("{n:.4} allocations")).unwrap_or_default();
    println!("{scenario:<22} {:>8.0} instructions  {allocations}", cost.instructions);
}

/// Messages a second of 1, 2, 4 and 8 members whose handler waits 5 ms.
fn members(program: &Program) -> Result<Vec<(u32, f64)>, String> {
    [1u32, 2, 4, 8]
        .into_iter()
        .map(|count| {
            let output = Command::new(program.path()).args(["members", &count.to_string(), "3"]).output();
            let output = output.map_err(|e| format!("the bench does not start: {e}"))?;
            let text = String::from_utf8_lossy(&output.stdout);
            let rate = text.split("rate ").nth(1).and_then(|t| t.trim().parse().ok());
            let rate = rate.ok_or_else(|| format!("members {count} printed: {text}"))?;
            println!("{count} members             {rate:>8.1} messages/s");
            Ok((count, rate))
        })
        .collect()
}

fn bars(costs: &Costs, members: &[(u32, f64)], peers: bool) -> Result<Vec<Bar>, String> {
    let cost = |name: &str| costs.get(name).ok_or_else(|| format!("scenario {name} was not measured"));
    let ir = |name: &str| cost(name).map(|c| c.instructions);
    let worker = ir("worker-empty")?;
    let mut bars = vec![
        Bar::at_most("publish, receive, ack in batches of 64", ir("batch64")?, 350.0),
        Bar::at_most("publish, receive, ack one by one", ir("single")?, 640.0),
        Bar::at_most("in two tasks, batches of 64", ir("two-tasks-batch64")?, 350.0 * 1.1),
        Bar::at_most("in two tasks, one by one", ir("two-tasks-single")?, 640.0 * 1.1),
        Bar::at_most("worker around an empty handler", worker, 650.0),
        Bar::at_most("worker, 16 handlers at a time", ir("worker-empty-16")?, 650.0),
        Bar::at_most("each further layer", (ir("worker-layers-4")? - worker) / 4.0, 20.0),
        // The bound of the empty worker, the bare decode, and 40 for taking the argument.
        Bar::at_most("worker with JSON", ir("worker-json")?, 650.0 + ir("json-bare")? + 40.0),
        Bar::at_most("1,000,000 queued against 1,000", ir("queued-1000000")?, ir("queued-1000")? * 1.05),
        Bar::at_most("1,000 topics against 1", ir("topics-1000")?, ir("topics-1")? * 1.05),
    ];
    for name in ["batch64", "single", "worker-empty", "worker-layers-4"] {
        bars.push(Bar::at_most(format!("allocations, {name}"), cost(name)?.allocations.unwrap_or(1.0), 0.001));
    }
    if let Some((_, one)) = members.first() {
        for (count, rate) in members {
            bars.push(Bar::at_least(format!("{count} members against one"), rate / one, 0.9 * f64::from(*count)));
        }
    }
    if peers {
        for peer in ["omniqueue", "ruststream"] {
            for (kind, own) in [("single", "single"), ("batch64", "batch64"), ("json", "json-batch64")] {
                bars.push(Bar::at_most(format!("ahead of {peer}, {kind}"), ir(own)?, ir(&format!("{peer}-{kind}"))?));
            }
        }
    }
    Ok(bars)
}

fn table(costs: &Costs, members: &[(u32, f64)], bars: &[Bar]) -> String {
    let mut text = String::from("| scenario | instructions a message | allocations a message |\n|---|---|---|\n");
    for (name, cost) in costs {
        let allocations = cost.allocations.map_or("not counted".to_owned(), |n| format!("{n:.4}"));
        let _ = writeln!(text, "| {name} | {:.0} | {allocations} |", cost.instructions);
    }
    text.push_str("\n| members, handler waits 5 ms | messages a second |\n|---|---|\n");
    for (count, rate) in members {
        let _ = writeln!(text, "| {count} | {rate:.0} |");
    }
    text.push_str("\n| bar | value | bound | |\n|---|---|---|---|\n");
    for bar in bars {
        let met = if bar.met { "met" } else { "missed" };
        let _ = writeln!(text, "| {} | {:.2} | {:.2} | {met} |", bar.what, bar.value, bar.most);
    }
    let _ = writeln!(text, "\n{}", summary(bars));
    text
}
