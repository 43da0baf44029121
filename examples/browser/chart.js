// The loss of each step, on a canvas.

const LEFT = 36;
const BOTTOM = 22;

/** A curve that grows: single steps faint, their moving average strong. */
export class LossChart {
  constructor(canvas) {
    this.canvas = canvas;
    this.losses = [];
    this.averages = [];
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  clear() {
    this.losses = [];
    this.averages = [];
    this.draw();
  }

  add(loss) {
    const last = this.averages.at(-1) ?? loss;
    this.losses.push(loss);
    this.averages.push(last + 0.1 * (loss - last));
    this.draw();
  }

  draw() {
    const { canvas } = this;
    const ratio = devicePixelRatio;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    [canvas.width, canvas.height] = [width * ratio, height * ratio];
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const style = getComputedStyle(canvas);
    const color = (name) => style.getPropertyValue(name);
    const top = Math.max(0.5, Math.ceil(Math.max(0, ...this.losses) * 2) / 2);
    const steps = Math.max(50, this.losses.length);
    const x = (step) => LEFT + ((width - LEFT - 4) * step) / (steps - 1);
    const y = (loss) => 8 + (height - BOTTOM - 8) * (1 - loss / top);
    context.font = `12px ${style.fontFamily}`;
    context.fillStyle = color("--soft");
    context.strokeStyle = color("--line");
    context.textBaseline = "middle";
    for (let line = 0; line <= 4; line++) {
      const loss = (top * line) / 4;
      context.textAlign = "right";
      context.fillText(loss.toFixed(top < 2 ? 2 : 1), LEFT - 8, y(loss));
      context.beginPath();
      context.moveTo(LEFT, y(loss));
      context.lineTo(width - 4, y(loss));
      context.stroke();
    }
    context.textAlign = "left";
    context.fillText(this.losses.length ? "step 1" : "The loss appears here, step by step", LEFT, height - 8);
    context.textAlign = "right";
    if (this.losses.length > 1) context.fillText(`${this.losses.length}`, x(this.losses.length - 1), height - 8);
    this.line(context, this.losses, x, y, color("--accent"), 1, 0.35);
    this.line(context, this.averages, x, y, color("--accent"), 2.5, 1);
  }

  line(context, values, x, y, color, width, alpha) {
    context.beginPath();
    values.forEach((value, step) => context.lineTo(x(step), y(value)));
    Object.assign(context, { strokeStyle: color, lineWidth: width, lineJoin: "round", globalAlpha: alpha });
    context.stroke();
    context.globalAlpha = 1;
  }
}
