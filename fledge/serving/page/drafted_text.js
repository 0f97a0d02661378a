/* Text that grows by pieces, and which of it the drafter had proposed. */

export class DraftedText {
  text = "";
  ends = []; // where each run ends; neighbours differ in `isDrafted`
  kinds = [];

  push(piece, isDrafted) {
    if (!piece) return;
    this.text += piece;
    const last = this.ends.length - 1;
    if (last >= 0 && this.kinds[last] === isDrafted) this.ends[last] = this.text.length;
    else {
      this.ends.push(this.text.length);
      this.kinds.push(isDrafted);
    }
  }

  /* Lengths of the runs, the first of them not drafted: what is stored. */
  get runs() {
    const lengths = this.ends.map((end, at) => end - (at ? this.ends[at - 1] : 0));
    return this.kinds[0] ? [0, ...lengths] : lengths;
  }

  static from(text, runs) {
    const made = new DraftedText();
    let at = 0;
    for (const [index, length] of (runs ?? []).entries()) {
      made.push(text.slice(at, at + length), index % 2 === 1);
      at += length;
    }
    made.push(text.slice(at), false);
    return made;
  }

  /* Nodes for a range; `shown` replaces its text (an entity). Drafted pieces are marked. */
  paint(start, end, shown) {
    const nodes = [];
    let run = this.#runAt(start);
    for (let at = start; at < end; run++) {
      const until = Math.min(end, this.ends[run] ?? end);
      const text = shown ?? this.text.slice(at, until);
      if (this.kinds[run]) {
        const mark = document.createElement("mark");
        mark.textContent = text;
        nodes.push(mark);
      } else nodes.push(document.createTextNode(text));
      if (shown !== undefined) break;
      at = until;
    }
    return nodes;
  }

  #runAt(position) {
    let low = 0, high = this.ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > position) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}
