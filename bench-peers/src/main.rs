//! `bench-peers SCENARIO N` runs one scenario, `bench-peers --list` names them. `cargo xtask bench memory` does the rest.

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args == ["--list"] {
        bench_peers::SCENARIOS.iter().for_each(|name| println!("{name}"));
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(bench_peers::run(&args[0], args[1].parse().expect("a number of messages")));
}
