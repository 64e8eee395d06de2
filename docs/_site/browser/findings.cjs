// What was looked at, and what of it failed where.

class Findings {
  #passed = 0;
  #failed = [];

  /** Note whether `holds`; `detail` says what was seen instead. */
  expect(where, what, holds, detail = "") {
    if (holds) this.#passed++;
    else this.#failed.push(`${where}: ${what}${detail === "" ? "" : `: ${detail}`}`);
  }

  /** Note that a list of faults is empty; each fault is a failure of its own. */
  none(where, what, faults) {
    if (!faults.length) this.#passed++;
    for (const fault of new Set(faults)) this.#failed.push(`${where}: ${what}: ${fault}`);
  }

  /** Note that `act` ends without an error, and give what it gives. */
  async attempt(where, what, act) {
    try {
      const result = await act();
      this.#passed++;
      return result;
    } catch (error) {
      this.#failed.push(`${where}: ${what}: ${error.message.split("\n")[0]}`);
      return undefined;
    }
  }

  /** Print what failed, and the count of both; gives how many failed. */
  report() {
    for (const failure of this.#failed.sort()) console.log(`FAILED ${failure}`);
    console.log(`${this.#passed} passed, ${this.#failed.length} failed`);
    return this.#failed.length;
  }
}

module.exports = { Findings };
