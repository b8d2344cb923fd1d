declare const Plot: any;
